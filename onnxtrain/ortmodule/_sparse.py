"""Sparse tensors in forward: PyTorch computes with them, between two graphs.

Dynamo takes none, and leaves a function that so much as reads one to Python, with all that is around. Here a sparse
tensor is a value that Dynamo knows nothing of: it cuts the graph where forward computes with it, and captures the rest.
Used by _captured.py while it captures.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export.state import wrapped
from onnxtrain._torch import is_sparse_any

_GUARDED = ("is_sparse", "is_sparse_csr", "layout", "dtype", "device", "shape", "ndim", "requires_grad")


def _is_of_sparse(value: object) -> bool:
    """Whether it is a sparse tensor, or its values or indices, which torch makes no tensor without data of."""
    return isinstance(value, Tensor) and (is_sparse_any(value) or value._is_view() and is_sparse_any(value._base))


@functools.cache
def _kind() -> type:
    class SparseVariable(_torch.UnknownVariable):  # type: ignore[misc]
        """Whatever forward asks of it, but for attributes that are no tensors, Python answers."""

        def __init__(self, given: Tensor, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.given = given

        def var_getattr(self, tx: _torch.Translator, name: str) -> object:
            if name in _GUARDED and self.source is not None:
                return _torch.VariableTracker.build(tx, getattr(self.given, name), _torch.AttrSource(self.source, name))
            return super().var_getattr(tx, name)

        def _cut(self, *_: object, **__: object) -> None:
            _torch.unimplemented(gb_type="PyTorch computes with a sparse tensor", context="",
                                 explanation="Dynamo takes no sparse tensors.", hints=[])

        as_proxy = call_method = python_type = _cut

    return SparseVariable


def _unknown(plain: Callable[..., object]) -> Callable[..., object]:
    """_wrap of what makes Dynamo's variables."""
    def wrap(self: Any, value: object) -> object:
        if not _is_of_sparse(value):
            return plain(self, value)
        self.install_guards(_torch.GuardBuilder.TYPE_MATCH)  # it is not None
        return _kind()(value, source=self.source)

    return wrap


def _cutting(operators: list[Callable[..., None]]) -> list[Callable[..., None]]:
    """Dynamo's reading of `a @ b` and the like, of each operator. It cuts a graph at a call, but leaves to Python all
    that is behind an operator that it does not take.
    """
    cut = _torch.break_graph_if_unsupported(push=True, msg_prefix="an operator, as a @ b")

    def either(plain: Callable[..., None]) -> Callable[..., None]:
        cutting = cut(plain)

        def read(self: _torch.Translator, instruction: object) -> None:
            has_sparse = any(isinstance(operand, _kind()) for operand in self.stack[-2:])
            (cutting if has_sparse else plain)(self, instruction)

        return read

    return list(map(either, operators))


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """While Dynamo captures."""
    with wrapped("wrap_value", _unknown), \
            wrapped("binary_operators", _cutting):
        yield
