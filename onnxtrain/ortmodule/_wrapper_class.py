"""The class of a wrapper: one for each class that is wrapped, which has it and ORTModule as bases.

So isinstance(ORTModule(m), type(m)) holds, and what Python looks up on the class is there, as for len(model).
ORTModule's own names win; all others of the wrapped class are read from the wrapped module. Called by ORTModule.
"""

from __future__ import annotations

import inspect
import logging
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from onnxtrain.ortmodule._module import ORTModule

# Methods that write the name of their object's class into a configuration file: they get the module itself.
_SAVING = frozenset(("save_pretrained", "save_config", "push_to_hub"))
_OF_EVERY_CLASS = frozenset(("__class__", "__dict__", "__doc__", "__module__", "__weakref__", "__slots__",
                             "__annotations__", "__annotate__", "__init_subclass__", "__class_getitem__"))
# Of torch, whose objects have state in C or in tables: what is an instance of these must be one of them.
_ALONE = ("torch.jit", "torch.distributed", "torch.nn.parallel")


class _Name:
    """A name of the wrapped class: on a wrapper the wrapped module's, on its class that of the wrapped one."""

    def __init__(self, wrapped: type, name: str) -> None:
        self._wrapped, self._name = wrapped, name

    def __get__(self, model: ORTModule | None, owner: type) -> object:
        return getattr(self._wrapped, self._name) if model is None else model.__getattr__(self._name)


def _operation(name: str) -> object:
    """What Python calls as type(model).<name>(model, ...)."""

    def method(self: ORTModule, *args: object) -> object:
        result = getattr(self._module, name)(*args)
        return self if result is self._module else result  # model += others; with model as m

    method.__name__ = name
    return method


def classed(kind: type, module: torch.nn.Module) -> type:
    """The subclass of `kind` and of the module's class; of `kind` alone, where no class can have both as bases."""
    kind, wrapped = getattr(kind, "_plain_class", kind), type(module)
    for made in type.__subclasses__(wrapped):
        if vars(made).get("_plain_class") is kind:
            return made
    operations, names = _names(kind, wrapped)
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
            "__slots__": (), "_plain_class": kind, **operations}
    if not any(base.__module__.startswith(_ALONE) for base in wrapped.__mro__):
        try:
            made = type(kind)(kind.__name__, (kind, wrapped), {**body, **names, "_wrapped_class": wrapped})
            object.__setattr__(object.__new__(kind), "__class__", made)  # raises where slots make another layout
            return made
        except Exception:  # its metaclass's, or a class without subclasses
            pass
    return type(kind)(kind.__name__, (kind,), body) if operations else kind


def _names(kind: type, wrapped: type) -> tuple[dict[str, object], dict[str, object]]:
    """What the class of a wrapper has of the wrapped class: the operations of Python, and the other names."""
    operations: dict[str, object] = {}
    names: dict[str, object] = {}
    for base in reversed(wrapped.__mro__[:wrapped.__mro__.index(torch.nn.Module)]):
        for name in vars(base).keys() - _OF_EVERY_CLASS:
            is_special, of_torch = name.startswith("__"), hasattr(torch.nn.Module, name)
            if of_torch and (is_special or name.startswith(("_", "register_"))) and not _is_own(kind, name):
                names[name] = inspect.getattr_static(torch.nn.Module, name)
            elif is_special and not of_torch and callable(getattr(wrapped, name)) and not hasattr(kind, name):
                operations[name] = _operation(name)
            elif not is_special and (not _is_own(kind, name) or name == "train"):
                names[name] = _Name(wrapped, name)
    return operations, names


def _is_own(kind: type, name: str) -> bool:
    """Whether ORTModule, or a subclass of it, defines or overrides a name of torch.nn.Module."""
    return any(name in vars(base) for base in kind.__mro__[:kind.__mro__.index(torch.nn.Module)])


def bound(model: ORTModule, value: types.MethodType) -> types.MethodType:
    """A method of the wrapped module, bound to the wrapper, so that self(...) inside runs there."""
    is_instance = isinstance(model, type(model._module))  # else super() would fail inside
    if not is_instance or not isinstance(value.__func__, types.FunctionType) or value.__name__ in _SAVING:
        return value
    return types.MethodType(value.__func__, model)


def blank(kind: type[ORTModule]) -> ORTModule:
    """An object of a class without its state, for unpickling: __setstate__ gives it its own."""
    return kind.__new__(kind)


def is_custom_method(module: torch.nn.Module, name: str) -> bool:
    """Whether a name is a method of the user's class, which ORTModule has as its own."""
    return isinstance(getattr(type(module), name, None), types.FunctionType) and not hasattr(torch.nn.Module, name)


def warn_of_collisions(ours: set[str], module: torch.nn.Module, debug: Any) -> None:
    """Warns about attributes of the user's module whose names ORTModule uses too: ORTModule's are found first."""
    ours = {name for name in ours if not name.startswith("__")}
    ours -= {"forward", "extra_repr", "train", "eval"}  # ORTModule's call the module's
    methods = [name for base in type(module).__mro__ if base.__module__.split(".")[0] != "torch" for name in vars(base)]
    held = vars(module).keys() - vars(torch.nn.Module()).keys()
    for name in (*sorted(ours & held), *sorted(ours & set(methods))):
        debug.log(logging.WARNING,
                  "User Module's attribute name %s collides with ORTModule's attribute name. User Module's attribute "
                  "may not be returned when trying to retrieve the attribute through ORTModule.", name)
