"""Sizes whose formulas grow too long for a capture: they become constants of it.

What windows, strides and padding make of an image's height is a formula, that of a layer the longer the more layers
are before it, and torch decides thousands of conditions on them: of windows of transformers' Swin for minutes. A size
that is fixed is guarded like any other, so that another one is captured again. Used by export.py and _captured.py.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain import _torch
from onnxtrain._export.state import settings, wrapped

LONGEST = 96  # terms of a formula: five strides in a row, as a ResNet has them, make 76


def _is_long(formula: sympy.Basic) -> bool:
    return next(itertools.islice(sympy.preorder_traversal(formula), LONGEST, None), None) is not None


def _values(sizes: ShapeEnv) -> dict[sympy.Symbol, sympy.Integer]:
    """Of each symbol that stands for an argument's size what it is in this call."""
    known = getattr(sizes, "backed_var_to_val", None)
    return sizes.var_to_val if known is None else known


def _shorten(sizes: ShapeEnv, formula: sympy.Basic, decide: Callable[..., object]) -> None:
    """Fixes symbols of a formula, the one that occurs most often first, until it is short."""
    formula = sizes.replace(formula)
    while _is_long(formula):
        values = _values(sizes)
        occurs = collections.Counter(term for term in sympy.preorder_traversal(formula)
                                     if isinstance(term, sympy.Symbol) and term in values)
        if not occurs:
            return
        symbol = max(occurs, key=lambda term: (occurs[term], str(term)))
        decide(sizes, sympy.Eq(symbol, values[symbol]))
        before, formula = formula, sizes.replace(formula)
        if formula == before:
            return


def _bounding(decide: Callable[..., object]) -> Callable[..., object]:
    """ShapeEnv.evaluate_expr that shortens a long formula first."""
    short: set[sympy.Basic] = set()

    def evaluate_expr(self: ShapeEnv, formula: object, *args: object, **kwargs: object) -> object:
        if isinstance(formula, sympy.Basic) and formula not in short:
            if not _is_long(formula):
                short.add(formula)
            elif not self.frozen and not self._suppress_guards_tls():
                _shorten(self, formula, decide)
        return decide(self, formula, *args, **kwargs)

    return evaluate_expr


@contextmanager
def bounded() -> Iterator[None]:
    """While a module is captured: no condition on a long formula is decided before it is shortened, and no result of
    symbolic sizes is kept, since it takes longer to keep than to make again.
    """
    with (wrapped("evaluate_expr", _bounding),
          settings(_torch.dynamo_config, fake_tensor_cache_enabled=False)):
        yield
