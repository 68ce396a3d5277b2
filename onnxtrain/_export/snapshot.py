"""Every plain object that a module leads to, as it was: to see what a forward changes besides tensors, and to undo it.

Used by state.py around every trace, and by export.py around the user's forward within one. Walks attributes, slots,
containers, closures, bound methods and class attributes; compares by identity, and puts contents back into the very
objects, which others may hold. Objects of the standard library and of torch (but modules) are not looked into: queues
and loaders belong to other threads. Knows nothing of graphs.
"""

from __future__ import annotations

import collections
import functools
import gc
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MAX_OBJECTS = 200_000  # beyond that nothing more is looked into
MAX_ITEMS = 4096  # of a container whose items are looked into; a longer one is still copied and compared itself

_VALUES = frozenset((type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device,
                     torch.layout, torch.memory_format, torch.Size, type(Ellipsis), types.ModuleType))
_COMPARED = frozenset((bool, int, float, complex, str, bytes))
_OTHERS = sys.stdlib_module_names - {"types", "collections", "argparse"} | {"torch", "numpy", "onnxtrain"}
_LRU = type(functools.lru_cache(len))


class Absent:
    """Stands for an attribute that is not there."""

    def __repr__(self) -> str:
        return "not there"


ABSENT = Absent()


def _is_others(kind: type) -> bool:
    """Whether a class is the standard library's, or torch's: its objects are left alone."""
    return str(getattr(kind, "__module__", "")).split(".")[0] in _OTHERS


def _slots(kind: type) -> list[Any]:
    """The descriptors of what objects of this class hold outside of `__dict__`."""
    return [member for base in kind.__mro__ if not _is_others(base) for member in vars(base).values()
            if type(member) is types.MemberDescriptorType]


def _held(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return ABSENT


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and type(a) in _COMPARED and (a == b or a != a and b != b)


# --- one object: how it is copied, compared and put back -----------------------------------------------------------


class _Dict:
    """A dict of any class, by the methods of the class that keeps it, whatever its own allow."""

    def __init__(self, value: dict[Any, Any]) -> None:
        self.value = value
        self.base: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        self.items = list(self.base.items(value))

    def parts(self) -> Iterator[tuple[Any, Any]]:
        for key, item in self.items:
            yield key, item
            if type(key) not in _VALUES:
                yield key, key

    def changed(self) -> list[Any]:
        """The keys whose values are others now; all of them where only the order is."""
        now = list(self.base.items(self.value))
        if len(now) == len(self.items) and all([a[0] is b[0] and a[1] is b[1] for a, b in zip(now, self.items)]):
            return []
        before, after = dict(self.items), dict(now)
        keys = [key for key in {**before, **after}
                if not _same(before.get(key, ABSENT), after.get(key, ABSENT))]
        moved = len(before) == len(after) and any([a != b for a, b in zip(before, after)])
        return list(before) if moved and not keys else keys

    def restore(self) -> None:
        self.base.clear(self.value)
        for key, item in self.items:
            self.base.__setitem__(self.value, key, item)


class _Row:
    """A list, set or deque."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.base = next(base for base in (list, set, collections.deque) if isinstance(value, base))
        self.items = list(self.base.__iter__(value))

    def parts(self) -> Iterator[tuple[Any, Any]]:
        return iter(enumerate(self.items))

    def changed(self) -> list[Any]:
        now = list(self.base.__iter__(self.value))
        same = len(now) == len(self.items) and all([_same(a, b) for a, b in zip(now, self.items)])
        return [] if same else [None]

    def restore(self) -> None:
        if self.base is list:
            list.__setitem__(self.value, slice(None), self.items)
            return
        self.base.clear(self.value)
        (set.update if self.base is set else collections.deque.extend)(self.value, self.items)


class _Slots:
    """What an object holds outside of `__dict__`; or a closure's cell."""

    def __init__(self, value: Any, slots: list[Any]) -> None:
        self.value = value
        self.items = [(slot, _held(slot, value)) for slot in slots]

    def parts(self) -> Iterator[tuple[Any, Any]]:
        return ((slot.__name__, item) for slot, item in self.items)

    def changed(self) -> list[Any]:
        return [slot.__name__ for slot, item in self.items if not _same(_held(slot, self.value), item)]

    def restore(self) -> None:
        for slot, item in self.items:
            if item is not ABSENT:
                slot.__set__(self.value, item)
            elif _held(slot, self.value) is not ABSENT:
                slot.__delete__(self.value)


class _Cell:
    """A variable of a closure."""

    def __init__(self, value: types.CellType) -> None:
        self.value, self.item = value, self._now(value)

    @staticmethod
    def _now(value: types.CellType) -> Any:
        try:
            return value.cell_contents
        except ValueError:
            return ABSENT

    def parts(self) -> Iterator[tuple[Any, Any]]:
        yield "", self.item

    def changed(self) -> list[Any]:
        return [] if _same(self._now(self.value), self.item) else [None]

    def restore(self) -> None:
        if self.item is not ABSENT:
            self.value.cell_contents = self.item
        elif self._now(self.value) is not ABSENT:
            del self.value.cell_contents


class _Class:
    """The attributes of a class."""

    def __init__(self, value: type) -> None:
        self.value, self.items = value, dict(vars(value))

    def parts(self) -> Iterator[tuple[Any, Any]]:
        return iter(self.items.items())

    def changed(self) -> list[Any]:
        now = vars(self.value)
        if len(now) == len(self.items) and all([now.get(key, ABSENT) is item for key, item in self.items.items()]):
            return []
        return [key for key in {**self.items, **now}
                if not _same(self.items.get(key, ABSENT), now.get(key, ABSENT))]

    def restore(self) -> None:
        for key in self.changed():
            if key in self.items:
                type.__setattr__(self.value, key, self.items[key])
            else:
                type.__delattr__(self.value, key)


class _Array:
    """The numbers of a NumPy array."""

    def __init__(self, value: Any) -> None:
        self.value, self.items = value, value.copy()

    def parts(self) -> Iterator[tuple[Any, Any]]:
        return iter(())

    def changed(self) -> list[Any]:
        return [] if self.value.tobytes() == self.items.tobytes() else [None]

    def restore(self) -> None:
        self.value[...] = self.items


class _Generator:
    """A random generator of the user's own; `get` and `set` are its ways to say and take its state."""

    def __init__(self, value: Any, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        self.value, self._get, self._set, self.state = value, get, set, get()

    def parts(self) -> Iterator[tuple[Any, Any]]:
        return iter(())

    def changed(self) -> list[Any]:
        return [] if repr_of(self._get()) == repr_of(self.state) else [None]

    def restore(self) -> None:
        self._set(self.state)


def repr_of(state: Any) -> Any:
    """A generator's state in a form that compares by value."""
    if isinstance(state, dict):
        return {key: repr_of(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(repr_of, state))
    return state.tolist() if hasattr(state, "tolist") else state


def _generator(value: Any, kind: type) -> _Generator | None:
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return _Generator(value, value.getstate, value.setstate)
    if issubclass(kind, torch.Generator):
        return _Generator(value, value.get_state, value.set_state)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and issubclass(kind, numpy.RandomState):
        return _Generator(value, value.get_state, value.set_state)
    if numpy is not None and issubclass(kind, numpy.Generator):
        bits = value.bit_generator
        return _Generator(value, lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


# --- all of them ------------------------------------------------------------------------------------------------------


class Change:
    """One object that is another now.

    Attributes:
        entry: what it was.
        path: how the module leads to it, as "child.meter".
        kind: its type's name.
        owner: the object whose `__dict__`, or whose dict `store`, it is; None of other things.
        keys: what of it is another; None for the whole.
    """

    def __init__(self, entry: Any, path: str, kind: str, owner: Any, store: str | None, keys: list[Any]) -> None:
        self.entry, self.path, self.kind, self.owner, self.store, self.keys = entry, path, kind, owner, store, keys

    @property
    def draws(self) -> bool:
        """Whether it is a generator, from which numbers were drawn."""
        return isinstance(self.entry, _Generator)

    def place(self, key: Any) -> str:
        """The name of one of its keys."""
        return self.path if key is None else f"{self.path}.{key}".lstrip(".")

    def settings(self) -> list[tuple[dict[str, Any], str, Any]] | None:
        """(attributes, name, value) where an object that is no module has got other numbers, strings or None alone."""
        if self.owner is None or isinstance(self.owner, torch.nn.Module):
            return None
        before, now = dict(self.entry.items), self.entry.value
        if all([type(before.get(key)) in _VALUES and type(now.get(key, ABSENT)) in _VALUES for key in self.keys]):
            return [(now, key, now[key]) for key in self.keys]
        return None


class Snapshot:
    """What `module` leads to, at the time of the call.

    Args:
        skipped: (module, attribute) whose value is not looked into.
    """

    def __init__(self, module: torch.nn.Module,
                 skipped: Callable[[Any, str], bool] = lambda _owner, _name: False) -> None:
        self._skipped = skipped
        self._slots: dict[type, list[Any]] = {}  # of the classes met
        self._entries: list[tuple[Any, str, Any, str | None]] = []  # (entry, path, owner, store)
        self._seen: dict[int, Any] = {}
        self._caches: list[tuple[Any, int]] = []  # functions with an lru_cache, and how often they had missed
        self._pending: list[tuple[Any, str]] = [(module, "")]
        while self._pending and len(self._entries) < MAX_OBJECTS:
            value, path = self._pending.pop()
            if type(value) not in _VALUES and id(value) not in self._seen:
                self._seen[id(value)] = value  # held, so that no other object gets its address
                self._visit(value, path)
        self._pending.clear()

    def objects(self) -> list[tuple[Any, str]]:
        """What is kept as it was, each with how the module leads to it."""
        return [(entry.value, path) for entry, path, *_ in self._entries]

    def tensors(self) -> list[Tensor]:
        """Plain tensors that the module leads to: parameters are none."""
        return [value for value in self._seen.values() if type(value) is Tensor]

    def changes(self) -> list[Change]:
        """What is not as it was."""
        found = []
        for entry, path, owner, store in self._entries:
            if keys := entry.changed():
                kind = type(entry.value if owner is None else owner).__name__
                found.append(Change(entry, path, kind, owner, store, keys))
        found += [Change(None, cache.__qualname__, "functools.lru_cache", None, None, [None])
                  for cache, misses in self._caches if cache.cache_info().misses != misses and _holds_fakes(cache)]
        return found

    def restore(self) -> None:
        """Puts back what is not as it was; an lru_cache that a trace has put its values into is emptied."""
        for entry, *_ in self._entries:
            if entry.changed():
                entry.restore()
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses and _holds_fakes(cache):
                cache.cache_clear()

    # --- the walk ---

    def _visit(self, value: Any, path: str) -> None:
        kind = type(value)
        if issubclass(kind, torch.nn.Module):
            self._object(value, path)
        elif issubclass(kind, (Tensor, types.ModuleType)):
            return
        elif issubclass(kind, dict):
            self._add(_Dict(value), path)
            self._rest(value, path)
        elif issubclass(kind, (list, set, collections.deque)):
            self._add(_Row(value), path)
            self._rest(value, path)
        elif issubclass(kind, (tuple, frozenset)):
            self._push(((str(i), item) for i, item in enumerate(value)), path, len(value))
        elif issubclass(kind, type):
            if not _is_others(value):
                self._add(_Class(value), path)
                self._own_caches(value, path)
        elif (generator := _generator(value, kind)) is not None:
            self._add(generator, path)
        elif kind is types.CellType:
            self._add(_Cell(value), path)
        elif self._callable(value, kind, path):
            return
        elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            if not value.dtype.hasobject and value.nbytes <= 1 << 24 and value.flags.writeable:
                self._add(_Array(value), path)
        elif not _is_others(kind):
            self._object(value, path)

    def _callable(self, value: Any, kind: type, path: str) -> bool:
        """Functions and what holds one; whether it was such a thing."""
        if kind is types.FunctionType:
            if (value.__module__ or "").split(".")[0] not in _OTHERS:
                self._push([("", value.__closure__ or ()), ("", value.__defaults__ or ()),
                            ("", value.__kwdefaults__ or {}), ("", value.__dict__)], path, 4)
        elif kind is types.MethodType:
            self._push([("", value.__self__), ("", value.__func__)], path, 2)
        elif kind is types.BuiltinFunctionType or kind is types.MethodWrapperType:
            self._push([("", value.__self__)], path, 1)
        elif kind is functools.partial:
            self._push([("", value.func), ("", value.args), ("", value.keywords)], path, 3)
        elif kind is _LRU:
            self._caches.append((value, value.cache_info().misses))
            self._push([("", value.__wrapped__)], path, 1)
        elif kind in (staticmethod, classmethod):
            self._push([("", value.__func__)], path, 1)
        elif kind is property:
            self._push([("", value.fget), ("", value.fset)], path, 2)
        else:
            return False
        return True

    def _object(self, value: Any, path: str) -> None:
        """Its attributes, those in slots, and its class's."""
        if isinstance(value, torch.nn.Module) and is_wrapper(value):
            self._push([("", object.__getattribute__(value, "__dict__").get("_module"))], path, 1)
            return
        self._rest(value, path)

    def _rest(self, value: Any, path: str) -> None:
        """What an object holds besides its items."""
        kind = type(value)
        if kind is dict or kind is list or kind is set:
            return
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            attributes = None
        if type(attributes) is dict and (attributes or not isinstance(value, (dict, list, set, collections.deque))):
            self._seen[id(attributes)] = attributes
            self._add(_Dict(attributes), path, value)
        if kind not in self._slots:
            self._slots[kind] = _slots(kind)
            self._pending.extend([(base, base.__qualname__) for base in kind.__mro__[:-1] if not _is_others(base)])
        if slots := self._slots[kind]:
            self._add(_Slots(value, slots), path)

    def _add(self, entry: Any, path: str, owner: Any = None) -> None:
        self._entries.append((entry, path, owner, None))
        module = isinstance(owner, torch.nn.Module)
        items = getattr(entry, "items", ())
        if len(items) > MAX_ITEMS:
            return
        for key, part in entry.parts():
            if module and self._skipped(owner, key):
                continue
            if module and key in ("_parameters", "_buffers", "_modules") and type(part) is dict:
                self._seen[id(part)] = part
                store = _Dict(part)
                self._entries.append((store, path, owner, key))
                self._push(store.parts(), path, len(store.items))
            elif type(part) not in _VALUES:
                self._push([(key, part)], path, 1)

    def _push(self, parts: Any, path: str, count: int) -> None:
        if count <= MAX_ITEMS:
            self._pending.extend([(part, f"{path}.{key}".strip(".")) for key, part in parts
                                  if type(part) not in _VALUES])

    def _own_caches(self, value: type, path: str) -> None:
        """Functions with a cache beside a class in its file."""
        names = vars(sys.modules.get(value.__module__, types)) if value.__module__ != "types" else {}
        self._push([("", item) for item in list(names.values()) if type(item) is _LRU][:MAX_ITEMS], path, 1)


def is_wrapper(value: torch.nn.Module) -> bool:
    """Whether it is an ORTModule, whose own programs and counts are no part of the user's module."""
    return any([kind.__module__.startswith("onnxtrain.ortmodule") for kind in type(value).__mro__])


def _holds_fakes(cache: Any) -> bool:
    """Whether a function's lru_cache holds what a trace has made."""
    pending, seen = list(gc.get_referents(cache)), 0
    while pending and seen < MAX_OBJECTS:
        value = pending.pop()
        seen += 1
        if isinstance(value, (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending += value
    return False
