"""What Python looks up on the class, not on the object: len(model), model[0], iteration, `in`, `with`.

ORTModule cannot define these itself, since then every wrapped module would seem to be a container, and an empty one to
be false. So a wrapper of a class that has some is of a subclass that has the same ones. Called by ORTModule's __init__.
"""

from __future__ import annotations

import functools
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


# Methods that write the name of their object's class into a configuration file: they get the module itself.
_SAVING = frozenset(("save_pretrained", "save_config", "push_to_hub"))


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


class _StandIn(metaclass=_Looking):
    """What a method of the module's class has as `self` where it calls super(), which wants an instance of that class:
    in all else the wrapper, so that self(...) runs there."""

    __slots__ = ("_ort_model",)

    def __init__(self, model: Any) -> None:
        object.__setattr__(self, "_ort_model", model)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what super() and isinstance() ask
        return type(self._ort_model._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ort_model._module if name == "__dict__" else self._ort_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ort_model._module, name, value)
        if name == "training":
            self._ort_model.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        delattr(self._ort_model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ort_model(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self._ort_model or type(other) is type(self) and other._ort_model is self._ort_model

    def __hash__(self) -> int:
        return hash(self._ort_model)

    def __repr__(self) -> str:
        return repr(self._ort_model)


_stand_ins: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def bound(model: Any, value: types.MethodType) -> Any:
    """A method of the wrapped module, bound to the wrapper, so that self(...) inside runs there."""
    function = value.__func__
    if not isinstance(function, types.FunctionType) or value.__name__ in _SAVING:
        return value
    if not _calls_super(function):
        return types.MethodType(function, model)
    wrapped = type(model._module)
    if wrapped not in _stand_ins:
        body: dict[str, Any] = {name: _delegated(name) for name in _NAMES if getattr(wrapped, name, None) is not None}
        _stand_ins[wrapped] = _Looking(wrapped.__name__, (_StandIn,),
                                       {**body, "__slots__": (), "_wrapped_class": weakref.ref(wrapped)})
    stand_in = _stand_ins[wrapped](model)

    @functools.wraps(value)
    def method(*args: Any, **kwargs: Any) -> Any:
        result = function(stand_in, *args, **kwargs)
        return model if result is stand_in else result

    return method


def _calls_super(function: Any) -> bool:
    """Whether a function, or one that it is a decorator's wrapper of, names the class that it is defined in."""
    while function is not None:
        if isinstance(function, types.FunctionType) and "__class__" in function.__code__.co_freevars:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def blank(kind: Any) -> Any:
    """An object of a class without its state, for unpickling: __setstate__ gives it its own."""
    return kind.__new__(kind)


def is_custom_method(module: torch.nn.Module, name: str) -> bool:
    """Whether a name is a method of the user's class, which ORTModule has as its own."""
    return isinstance(getattr(type(module), name, None), types.FunctionType) and not hasattr(torch.nn.Module, name)
