"""Whether a method that a capture may have followed has been replaced in its class since, by a monkeypatch or a
notebook's autoreload. Dynamo guards attributes of modules and global functions, and not the functions of a class.

Called by _captured.py. torch's own classes are left out.
"""

from __future__ import annotations

import gc
import operator
import types
from collections.abc import Iterator

import torch

from onnxtrain import _C

HOOKS = ("register_hook", "retain_grad")
_ABSENT = object()
_code = operator.attrgetter("__code__")


class Methods:
    """The functions that forward may call: those of the classes of a module's submodules, and of what is in their
    attributes, whose names forward's code has, and the code of these, and so on.

    Attributes:
        hooks: whether one of them has the name of a method that gives a tensor a hook.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        classes = _classes(module)
        found: dict[type, dict[str, object]] = {cls: {} for cls in classes}
        functions: dict[types.FunctionType, None] = {}
        names, new = {"forward", "__call__"}, True
        while new:
            new = False
            for cls in classes:
                for name, value in vars(cls).items():
                    if name in names and name not in found[cls] and (own := list(_functions(value))):
                        found[cls][name] = value
                        functions.update(dict.fromkeys(own))
                        names.update(*(code.co_names for function in own for code in _codes(function.__code__)))
                        new = True
        self.hooks = not names.isdisjoint(HOOKS)
        for cls in classes:  # one of a base class may be overridden
            inherited = (name for base in cls.__mro__[1:] for name in found.get(base, ()))
            found[cls] |= {name: _ABSENT for name in inherited if name not in vars(cls)}
        # What a mappingproxy shows is the one object that it refers to.
        self._watch = _C.Watch([(gc.get_referents(cls.__dict__)[0], tuple(known), tuple(known.values()))
                                for cls, known in found.items() if known], _ABSENT)
        self._functions = list(functions)
        self._codes = list(map(_code, self._functions))

    def changed(self) -> bool:
        """Whether a class has another function now, or a function other code."""
        return self._watch.changed() >= 0 or list(map(_code, self._functions)) != self._codes


def _classes(module: torch.nn.Module) -> list[type]:
    """Without repetition, in a fixed order."""
    types_of = {type(part): None for part in module.modules()}
    types_of |= {type(value): None for part in module.modules() for value in vars(part).values()}
    found = {cls: None for kind in types_of for cls in kind.__mro__}
    known = ("builtins", "torch", "abc", "collections")
    return [cls for cls in found if str(cls.__module__).partition(".")[0] not in known]


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Of an attribute of a class: a function in any of its forms, and those that it wraps."""
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _functions(part)
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    while isinstance(value, types.FunctionType):
        yield value
        value = getattr(value, "__wrapped__", None)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code and those of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
