"""What a forward reads and assigns on its modules while it is traced, and whether that still holds at a later step.

export.py enters recording() around the user's forward; ORTModule keeps the State made of it beside the program and asks
it at every step. A graph has frozen every attribute that forward read, so it is stale as soon as one of them changes;
attributes that forward never read are of no concern.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onnxtrain._export import exclusive, values
from onnxtrain._export.snapshot import ABSENT
from onnxtrain._export.state import follows_parameters, replaced

MAX_ITEMS = 1024  # a plain container with more is compared by identity alone
MAX_DEPTH = 4  # of containers and objects within an attribute
MAX_VALUES = 50_000  # of one module: beyond that nothing more is looked into
_STORES = ("_parameters", "_buffers", "_modules")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout,
          torch.memory_format, range, slice)
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, Tensor,
           torch.nn.Module, logging.Logger, torch.Generator)


HOOKS = frozenset(("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"))
_MACHINERY = {"__dict__", "__class__", "_call_impl", "_compiled_call_impl", "_slow_forward", "_wrapped_call_impl"}


@dataclasses.dataclass
class Record:
    """Attributes of modules, by object: those read, and those assigned with what they were before. Where the export may
    be kept on disk, the code that ran as well.
    """

    reads: dict[torch.nn.Module, set[str]] = dataclasses.field(default_factory=dict)
    writes: dict[tuple[torch.nn.Module, str], Any] = dataclasses.field(default_factory=dict)
    entered: values.Entered | None = None


@contextlib.contextmanager
def recording(record: Record, module: torch.nn.Module) -> Iterator[None]:
    """Records what this thread reads and assigns on any torch.nn.Module while `module` is traced. Reads by torch's own
    lookup are left out."""
    module_class, thread = torch.nn.Module, threading.get_ident()
    look_up, assign, delete = module_class.__getattr__, module_class.__setattr__, module_class.__delattr__
    inside = 0

    def getattribute(self: torch.nn.Module, name: str) -> Any:
        if not inside and threading.get_ident() == thread:
            record.reads.setdefault(self, set()).add(name)
        return super(module_class, self).__getattribute__(name)

    def quietly(function: Any, write: bool) -> Any:
        def call(self: torch.nn.Module, name: str, *value: Any) -> Any:
            nonlocal inside
            if threading.get_ident() != thread:
                return function(self, name, *value)
            inside += 1
            try:
                if write:
                    record.writes.setdefault((self, name), attribute(self, name))
                return function(self, name, *value)
            finally:
                inside -= 1

        return call

    ours = {"__getattr__": quietly(look_up, False), "__setattr__": quietly(assign, True),
            "__delattr__": quietly(delete, True), "__getattribute__": getattribute}
    torchs = {name: vars(module_class)[name] for name in ours if name in vars(module_class)}
    with contextlib.ExitStack() as stack:
        for name, method in ours.items():
            stack.enter_context(replaced(module_class, name, method))
        stack.enter_context(_compiled_parts(record, module, ours, torchs))
        yield


@contextlib.contextmanager
def _compiled_parts(record: Record, module: torch.nn.Module, ours: dict[str, Any],
                    torchs: dict[str, Any]) -> Iterator[None]:
    """torch.cond and similar operators make torch's compiler read their branches, which cannot follow a recorder.

    It is put aside for so long, and every attribute of the module counts as read.
    """
    from torch._higher_order_ops import utils

    plain = getattr(utils, "_hop_compile_and_call", None)
    if plain is None:  # another torch: the export of such a module fails, and says so
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        if not exclusive.here() or exclusive.inlined:
            return plain(*args, **kwargs)
        for child in module.modules():
            record.reads.setdefault(child, set()).add("__dict__")
        if record.entered is not None:
            record.entered.unseen = "torch's compiler reads a part of forward, as in torch.cond"
        exclusive.inlined = True
        try:
            for name in ours:
                setattr(torch.nn.Module, name, torchs[name]) if name in torchs else delattr(torch.nn.Module, name)
            return plain(*args, **kwargs)
        finally:
            for name, method in ours.items():
                setattr(torch.nn.Module, name, method)
            exclusive.inlined = False

    with replaced(utils, "_hop_compile_and_call", call):
        yield


def attribute(module: torch.nn.Module, name: str) -> Any:
    """What the instance itself holds under a name, or ABSENT."""
    attributes = module.__dict__
    if name in attributes:
        return attributes[name]
    for store in _STORES:
        if name in attributes.get(store, ()):
            return attributes[store][name]
    return ABSENT


# --- comparing at later steps -----------------------------------------------------------------------------------------


class State:
    """The attributes that a program froze.

    Args:
        module: the user's, in the state that it was exported in.
        record: what its forward read.
        bound: (module, attribute) pairs whose tensor is an input of the graph, read at each step.
    """

    def __init__(self, module: torch.nn.Module, record: Record,
                 bound: frozenset[tuple[int, str]] = frozenset()) -> None:
        names = {child: name for name, child in module.named_modules()}
        self._reads = [(child, names.get(child, type(child).__name__), frozenset(read))
                       for child, read in record.reads.items()]
        self._bound = bound
        self._ties = _ties(module)
        self._module = module
        self.take()

    def is_of(self, module: torch.nn.Module) -> bool:
        """Whether hooks of this module and its parts are all that it is about."""
        parts = set(module.modules())
        return not self._bound and all(child in parts and read <= HOOKS for child, _, read in self._reads)

    def take(self) -> None:
        """From now on, what the modules hold now is what has to stay."""
        snapshot = _Snapshot(self._bound)
        for child, name, read in self._reads:
            snapshot.add_module(child, name, read)
        snapshot.add_global_hooks()
        self._values = snapshot.values
        self._watch = snapshot.watch()
        self._kept = snapshot.kept
        self._tensors = snapshot.tensors

    def difference(self) -> str | None:
        """None where the program still holds, else which attribute is another."""
        if self._watch.changed() < 0 and not self._ties and not self._tensors:
            return None
        return self._explain_rest()

    def _explain_rest(self) -> str | None:
        if any([a.get(b) is not c.get(d) for a, b, c, d in self._ties]):
            return "parameters that were one are so no longer"
        for path, tensor, version in self._tensors:
            if tensor._version != version:
                return f"the tensor {path}, whose contents are part of the graph, was changed in place"
        return None if self._watch.changed() < 0 else self._explain()

    def _explain(self) -> str | None:
        """Objects were exchanged: perhaps by equal ones."""
        snapshot = _Snapshot(self._bound)
        for child, name, read in self._reads:
            snapshot.add_module(child, name, read)
        snapshot.add_global_hooks()
        for path in (*self._values, *snapshot.values):
            before, now = self._values.get(path, ABSENT), snapshot.values.get(path, ABSENT)
            if before is not now and before != now:
                return f"attribute {path} is {_show(now)}, and was {_show(before)}"
        self.take()
        return None


def _show(value: Any) -> str:
    text = repr(value[1]) if isinstance(value, tuple) and len(value) == 2 else repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def _ties(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, dict[str, Any], str]]:
    """Pairs of places that hold one parameter: the graph has one input for both."""
    first: dict[int, tuple[dict[str, Any], str]] = {}
    ties = []
    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                known = first.setdefault(id(tensor), (store, name))
                if known[0] is not store or known[1] != name:
                    ties.append((*known, store, name))
    return ties


class _Identity:
    """Equal to itself for the same object only; holds it, so that its address is not taken by another."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


class _Snapshot:
    """Values by path, for comparison, and the entries of a Watch that sees when one may have changed."""

    def __init__(self, bound: frozenset[tuple[int, str]]) -> None:
        self.values: dict[str, Any] = {}
        self.kept: list[Any] = []
        self.tensors: list[tuple[str, Tensor, int]] = []
        self._entries: list[tuple[Any, Any, Any]] = []
        self._seen: set[int] = set()
        self._bound = bound

    def watch(self) -> Any:
        from onnxtrain import _C

        return _C.Watch(self._entries, ABSENT)

    def add_module(self, module: torch.nn.Module, name: str, read: frozenset[str]) -> None:
        attributes = module.__dict__
        names = set(attributes) if "__dict__" in read else set(read) - _MACHINERY
        names = {n for n in names if (id(module), n) not in self._bound and not follows_parameters(module, n)}
        stores = {store: attributes.get(store, {}) for store in _STORES}
        own = sorted(n for n in names if not any(n in store for store in stores.values()) and n not in _STORES)
        self._watch_keys(attributes, own)
        for key in own:
            self._value(f"{name}.{key}".lstrip("."), attributes.get(key, ABSENT), 0)
        for key, store in stores.items():
            whole = key in names or key == "_modules" and bool(store)
            held = sorted(store) if whole else sorted(names & set(store))
            if key == "_modules":
                self._watch_whole(store) if whole else self._watch_keys(store, held)
            else:
                self._watch_keys(store, [n for n in held if store[n] is None])
                if whole:
                    self.values[f"{name}.{key}".lstrip(".")] = (tuple, tuple(store))
                    self._watch_whole(store)
            for n in held:
                value = store[n]
                frozen = value if key == "_modules" or value is None else "a tensor"
                self.values[f"{name}.{n}".lstrip(".")] = (_Identity(value) if frozen is value and value is not None
                                                          else frozen)

    def add_global_hooks(self) -> None:
        hooks = torch.nn.modules.module
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                     "_global_backward_pre_hooks"):
            self._value(name, getattr(hooks, name), 0)

    def _watch_keys(self, container: dict[str, Any], keys: list[str]) -> None:
        if keys:
            self._entries.append((container, tuple(keys), tuple(container.get(key, ABSENT) for key in keys)))

    def _watch_whole(self, container: dict[Any, Any]) -> None:
        if id(container) not in self._seen:
            self._seen.add(id(container))
            self._entries.append((container, None, tuple(part for item in container.items() for part in item)))

    def _value(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self.values[path] = (type(value), repr(value) if isinstance(value, float) else value)
        elif value is ABSENT:
            self.values[path] = ABSENT
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            self._container(path, value, depth)
        elif not isinstance(value, _OPAQUE) and isinstance(getattr(value, "__dict__", None), dict):
            self._container(path, value.__dict__, depth, type(value))
        else:
            self.values[path] = _Identity(value)
            if isinstance(value, types.FunctionType) and value.__closure__ and depth < MAX_DEPTH:
                self._closure(path, value, depth)
            if isinstance(value, Tensor) and not value.is_inference():
                self.tensors.append((path, value, value._version))

    def _closure(self, path: str, value: types.FunctionType, depth: int) -> None:
        """Containers and objects in the closure of a function; a later assignment to a variable is not seen."""
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            with contextlib.suppress(ValueError):  # one that is still empty
                self._value(f"{path}.{name}", cell.cell_contents, depth + 1)

    def _container(self, path: str, value: Any, depth: int, kind: type | None = None) -> None:
        self.values[path] = (kind or type(value), len(value))
        self.kept.append(value)
        if id(value) in self._seen or depth >= MAX_DEPTH or len(value) > MAX_ITEMS or len(self.values) > MAX_VALUES:
            return
        if isinstance(value, dict):
            self._watch_whole(value)
            items = [(str(key), item) for key, item in value.items()]
        elif isinstance(value, (set, frozenset)):
            self._entries.append((value, None, frozenset(value)))
            self.values[path] = (kind or type(value), frozenset(value))
            items = []
        else:
            if isinstance(value, list):
                self._entries.append((value, None, tuple(value)))
            items = [(str(index), item) for index, item in enumerate(value)]
        self._seen.add(id(value))
        for key, item in items:
            self._value(f"{path}.{key}", item, depth + 1)
