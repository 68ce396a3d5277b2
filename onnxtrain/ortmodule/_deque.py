"""A deque(maxlen=...) that forward fills: Dynamo takes one that it is given for a deque without an end.

Within a capture it has its end, and what drops out at it is gone from the deque when the graph has run, as in eager.
Used by _captured.py while it captures.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from onnxtrain._export.state import wrapped


def _cut(what: str) -> Any:
    from torch._dynamo.exc import unimplemented

    unimplemented(gb_type=what, context="", explanation="Dynamo gives it another length.", hints=[])


def _with_its_end(plain: Callable[..., Any]) -> Callable[..., Any]:
    """_wrap of what makes Dynamo's variables."""
    def wrap(self: Any, value: Any) -> Any:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource
        from torch._dynamo.variables import ConstantVariable

        found = plain(self, value)
        if type(value) is collections.deque and value.maxlen is not None:
            if not value.maxlen:
                _cut("a deque(maxlen=0)")
            found.maxlen = ConstantVariable.create(value.maxlen)
            install_guard(AttrSource(self.source, "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
        return found

    return wrap


def _with_the_same_end(plain: Callable[..., Any]) -> Callable[..., Any]:
    """modified of Dynamo's variable for a deque, which makes that of a copy."""
    return lambda self, items, **kwargs: plain(self, items, maxlen=self.maxlen, **kwargs)


def _not_repeated(plain: Callable[..., Any]) -> Callable[..., Any]:
    """sq_repeat_impl of the same."""
    def repeat(self: Any, tx: Any, count: Any) -> Any:
        return _cut("a deque(maxlen=...) repeated") if self.maxlen.as_python_constant() else plain(self, tx, count)

    return repeat


def _filled_again(plain: Callable[..., None]) -> Callable[..., None]:
    """codegen_update_mutated of Dynamo's side effects. It writes code that clears a deque and gives it its new items,
    of which there are no more than it holds; but it refuses one with an end.
    """
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        from torch._dynamo.variables import ConstantVariable, DequeVariable

        given = [(each, each.maxlen) for each in self._get_modified_vars()
                 if isinstance(each, DequeVariable) and each.source is not None]
        for each, _ in given:
            each.maxlen = ConstantVariable.create(None)
        try:
            plain(self, *args, **kwargs)
        finally:
            for each, end in given:
                each.maxlen = end

    return update


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """While Dynamo captures."""
    with wrapped("torch._dynamo.variables.builder:VariableBuilder._wrap", _with_its_end), \
            wrapped("torch._dynamo.variables:DequeVariable.modified", _with_the_same_end), \
            wrapped("torch._dynamo.variables:DequeVariable.sq_repeat_impl", _not_repeated), \
            wrapped("torch._dynamo.side_effects:SideEffects.codegen_update_mutated", _filled_again):
        yield
