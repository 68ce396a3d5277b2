"""What Python looks up on the class, not on the object: len(model), model[0], iteration, `in`, `with`.

ORTModule cannot define these itself, since then every wrapped module would seem to be a container, and an empty one to
be false. So a wrapper of a class that has some is of a subclass that has the same ones. Called by ORTModule's __init__.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

_NAMES = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__next__", "__reversed__",
          "__contains__", "__bool__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__add__", "__radd__",
          "__iadd__", "__mul__", "__rmul__", "__imul__", "__int__", "__float__", "__index__", "__length_hint__",
          "__array__", "__matmul__")


def _delegated(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        result = getattr(self._module, name)(*args)
        return self if result is self._module else result  # model += others; with model as m

    method.__name__ = name
    return method


def classed(kind: type, module: torch.nn.Module) -> type:
    """`kind`, or a subclass of it with those of the methods above that the module's class has."""
    kind = getattr(kind, "_plain_class", kind)
    own = tuple(name for name in _NAMES if getattr(type(module), name, None) is not None
                and not hasattr(torch.nn.Module, name))
    return _subclass(kind, own) if own else kind


@functools.lru_cache(maxsize=None)
def _subclass(kind: type, names: tuple[str, ...]) -> type:
    body = {name: _delegated(name) for name in names}
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
             "_plain_class": kind, "__slots__": ()}
    return type(kind.__name__, (kind,), body)


def blank(kind: type) -> Any:
    """An object of a class without its state, for unpickling: __setstate__ gives it its own."""
    return kind.__new__(kind)


def is_custom_method(module: torch.nn.Module, name: str) -> bool:
    """Whether a name is a method of the user's class, which ORTModule has as its own."""
    return isinstance(getattr(type(module), name, None), types.FunctionType) and not hasattr(torch.nn.Module, name)
