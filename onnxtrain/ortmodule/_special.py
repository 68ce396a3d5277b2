"""What Python looks up on the class, not on the object: len(model), model[0], iteration, `in`, `with`.

ORTModule cannot define these itself, since then every wrapped module would seem to be a container, and an empty one to
be false. So a wrapper of a class that has some is of a subclass that has the same ones. Called by ORTModule's __init__.
"""

from __future__ import annotations

import types
import weakref
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


class _Looking(type):
    """Of a wrapper's class: what it has not, the wrapped module's class has, as for getattr(type(self), name) in
    transformers' generate()."""

    def __getattr__(cls, name: str) -> Any:
        wrapped = None if name.startswith("__") or name == "_wrapped_class" else cls._wrapped_class()
        if wrapped is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return getattr(wrapped, name)


_made: weakref.WeakKeyDictionary[type, dict[type, type]] = weakref.WeakKeyDictionary()  # by the wrapped class


def classed(kind: type, module: torch.nn.Module) -> type:
    """`kind`, or a subclass of it with those of the methods above that the module's class has, and its attributes."""
    kind = getattr(kind, "_plain_class", kind)
    own = _made.setdefault(type(module), {})
    if kind not in own:
        own[kind] = _subclass(kind, type(module))
    return own[kind]


def _subclass(kind: type, wrapped: type) -> type:
    body: dict[str, Any] = {name: _delegated(name) for name in _NAMES
                            if getattr(wrapped, name, None) is not None and not hasattr(torch.nn.Module, name)}
    more = [name for name in dir(wrapped) if not name.startswith("__") and not hasattr(torch.nn.Module, name)]
    if not body and (not more or wrapped.__module__.split(".")[0] == "torch"):
        return kind
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
             "_plain_class": kind, "_wrapped_class": weakref.ref(wrapped), "__slots__": ()}
    return (_Looking if type(kind) is type else type(kind))(kind.__name__, (kind,), body)


def blank(kind: type) -> Any:
    """An object of a class without its state, for unpickling: __setstate__ gives it its own."""
    return kind.__new__(kind)


def is_custom_method(module: torch.nn.Module, name: str) -> bool:
    """Whether a name is a method of the user's class, which ORTModule has as its own."""
    return isinstance(getattr(type(module), name, None), types.FunctionType) and not hasattr(torch.nn.Module, name)
