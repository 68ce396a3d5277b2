"""What a module's attributes lead to, read without a call of their classes: one may forbid len(), iteration or ==.

Used by _captured.py, before it captures, and by _forward.py.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

MAX_OBJECTS = 200_000  # that a module leads to; beyond that nothing more is looked into
MAX_ITEMS = 4096  # of a container whose items are looked into
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, types.ModuleType)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_OTHERS = sys.stdlib_module_names - {"types", "collections", "argparse"} | {"torch", "numpy", "onnxtrain"}
_INSIDE: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"), functools.partial: ("func", "args", "keywords"),
    functools._lru_cache_wrapper: ("__wrapped__",), staticmethod: ("__func__",), classmethod: ("__func__",),
    property: ("fget", "fset"), types.CellType: ("cell_contents",),
    types.FunctionType: ("__closure__", "__defaults__", "__kwdefaults__")}


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """isinstance() that does not ask the value, whose class may have a __class__ of its own."""
    return issubclass(type(value), kinds)


def items(value: object, most: float = math.inf) -> list[object] | None:
    """Those of a sequence or set, read as its builtin class does: a subclass may forbid len() and iteration. None for
    other objects, and where there are more items.
    """
    kind: Any = next((kind for kind in _SEQUENCES if is_a(value, kind)), None)
    return None if kind is None or kind.__len__(value) > most else list(kind.__iter__(value))


def attributes(value: object) -> dict[str, object]:
    """Those in the object's __dict__, without asking its class for them."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or its class makes one
        return {}
    return found if type(found) is dict else {}


def misread(module: torch.nn.Module) -> str | None:
    """What the module leads to that Dynamo reads wrongly, the numbers of a generator, which it takes from another one;
    or leaves out, another ORTModule.
    """
    from onnxtrain.ortmodule import ORTModule

    seen: dict[int, object] = {}  # held, so that no other object gets an address
    pending: list[tuple[object, str]] = [(module, "")]
    while pending and len(seen) < MAX_OBJECTS:
        value, path = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if is_a(value, ORTModule):
            if attributes(value).get("_module") is module:  # its own wrapper, which a hook may lead to
                continue
            name = path.replace("_modules.", "")
            return f"its {name!r} is an ORTModule already, which the engine runs alone: wrap one of the two"
        if is_a(value, random.Random):
            return f"Dynamo does not follow the random.Random {path!r}"
        for name, part in held_by(value):
            if not is_a(part, _PLAIN):
                name = name if type(name) in (str, int) else type(name).__name__
                pending.append((part, f"{path}.{name}".strip(".")))
    return None


def held_by(value: Any) -> Iterator[tuple[Any, object]]:
    """What an object of the user's leads to; objects of the standard library and of torch, but for modules, are left
    alone.
    """
    kind = type(value)
    if is_a(value, dict):
        if dict.__len__(value) <= MAX_ITEMS:
            yield from dict.items(value)
    elif is_a(value, _SEQUENCES):
        yield from enumerate(items(value, MAX_ITEMS) or ())
    elif kind in _INSIDE:
        if kind is not types.FunctionType or not _is_others(value):
            for name in _INSIDE[kind]:
                with contextlib.suppress(ValueError):  # a cell that is still empty
                    yield "", getattr(value, name)
        return
    elif is_a(value, type):
        if not _is_others(value):
            yield from vars(value).items()
        return
    if not is_a(value, torch.nn.Module) and _is_others(kind):
        return
    yield from attributes(value).items()
    for base in kind.__mro__:
        if not _is_others(base):
            yield base.__qualname__, base
            for name, member in vars(base).items():
                if type(member) is types.MemberDescriptorType:  # of a slot
                    with contextlib.suppress(AttributeError):
                        yield name, member.__get__(value)


def _is_others(kind: object) -> bool:
    return str(getattr(kind, "__module__", "")).split(".")[0] in _OTHERS
