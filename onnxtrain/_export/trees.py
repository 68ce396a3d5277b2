"""Containers that torch's pytree does not know by itself: dataclasses, subclasses of dict, and transformers' caches.

Called where a leaf turns up that is none. A class is registered once per process, after which torch.export and
ORTModule take its instances apart and build equal ones, without calling __init__ again.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain._export.errors import NotKept

_lock = threading.Lock()


def register(leaf: Any) -> bool:
    """Whether `leaf` is a container now that was none before."""
    kind = type(leaf)
    with _lock:
        if kind in pytree.SUPPORTED_NODES:
            return True  # by another thread
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, dict)):
            _register_object(kind)
        elif isinstance(leaf, dict) and not getattr(leaf, "__dict__", None):
            _register_mapping(kind)
        elif isinstance(leaf, cache_kinds(parts=True)) and not _counts(leaf):
            _register_object(kind)
        else:
            return False
    return True


def _counts(leaf: Any) -> bool:
    """Whether an object holds plain numbers: a constant of a graph each, so that one that counts tokens would need a
    graph for each token."""
    return any([type(value) in (int, float) for value in vars(leaf).values()])


def cache_kinds(parts: bool = False) -> tuple[type, ...]:
    """transformers' classes of caches, or of those and of their layers, where it is in use."""
    module = sys.modules.get("transformers.cache_utils")
    names = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer") if parts else ("Cache",)
    return tuple([getattr(module, name) for name in names if hasattr(module, name)])


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    """pytree.tree_flatten, with every class registered that can be."""
    while True:
        leaves, spec = pytree.tree_flatten(tree, is_leaf)
        if not any([register(leaf) for leaf in leaves
                    if not isinstance(leaf, _COMMON) and not (is_leaf is not None and is_leaf(leaf))]):
            return leaves, spec


class Leaves(list[Any]):
    """The leaves of a call, and the arguments themselves, of which some are filled."""

    __slots__ = ("arguments",)

    def __init__(self, leaves: list[Any], arguments: Any) -> None:
        super().__init__(leaves)
        self.arguments = arguments


_COMMON = (type(None), bool, int, float, str, torch.Tensor)


def _register_object(kind: type) -> None:
    """Every attribute that the instance holds, fields or not, in order; those that are not set are left so."""

    def names(value: Any) -> tuple[str, ...]:
        fields = ([field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
                  if dataclasses.is_dataclass(value) else ())
        return tuple(dict.fromkeys((*fields, *getattr(value, "__dict__", ()))))

    def take_apart(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        held = names(value)
        return [getattr(value, name) for name in held], held

    def build(values: Any, held: tuple[str, ...]) -> Any:
        made: Any = object.__new__(kind)
        for name, value in zip(held, values):
            object.__setattr__(made, name, value)
        return made

    def with_keys(value: Any) -> Any:
        held = names(value)
        return [(pytree.GetAttrKey(name), getattr(value, name)) for name in held], held

    pytree.register_pytree_node(kind, take_apart, build, flatten_with_keys_fn=with_keys,
                                serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
                                to_dumpable_context=list, from_dumpable_context=tuple)


def _register_mapping(kind: type) -> None:
    base = collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict

    def take_apart(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return list(value.values()), tuple(value)

    def build(values: Any, keys: tuple[Any, ...]) -> Any:
        made: Any = base.__new__(kind)
        for key, value in zip(keys, values):
            base.__setitem__(made, key, value)
        return made

    def with_keys(value: Any) -> Any:
        return [(pytree.MappingKey(key), item) for key, item in value.items()], tuple(value)

    pytree.register_pytree_node(kind, take_apart, build, flatten_with_keys_fn=with_keys,
                                serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
                                to_dumpable_context=list, from_dumpable_context=tuple)


# --- on disk ----------------------------------------------------------------------------------------------------------

_PLAIN = (type(None), bool, int, float, str)
_BY_NAME = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": collections.OrderedDict}


def _registered(name: str) -> type | None:
    """The class of this name that is registered with pytree in this process. Nothing is imported."""
    return next((kind for kind in pytree.SUPPORTED_NODES
                 if isinstance(kind, type) and f"{kind.__module__}.{kind.__qualname__}" == name), None)


def _loaded(name: str) -> type | None:
    """A class of that name in a module that this process has imported, if it is one that register() takes."""
    module, kind = name, None
    while kind is None and "." in module:
        module = module.rpartition(".")[0]
        kind = vars(sys.modules[module]).get(name[len(module) + 1:]) if module in sys.modules else None
    if not isinstance(kind, type):
        return None
    with _lock:
        if dataclasses.is_dataclass(kind) and not issubclass(kind, dict):
            _register_object(kind)
        elif issubclass(kind, dict) and not dataclasses.is_dataclass(kind):
            _register_mapping(kind)
        else:
            return None
    return kind


def written(spec: pytree.TreeSpec) -> Any:
    """A structure as JSON has it: plain containers, and classes that are registered with pytree under their names.

    Raises:
        NotKept: other containers, or keys that are no plain values.
    """
    if spec.is_leaf():
        return None
    kind = spec.type
    name = next((name for name, known in _BY_NAME.items() if known is kind), None)
    if name is None:
        name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"
        if _registered(name) is not kind or kind.__module__ in ("collections", "torch.return_types"):
            raise NotKept(f"an argument or a result is, or holds, a {name}")
    return [name, _context_out(spec._context), [written(child) for child in spec._children]]


def read(data: Any) -> pytree.TreeSpec:
    """The structure of written().

    Raises:
        ValueError: it names a container that is not registered in this process, or is none at all.
    """
    if data is None:
        return pytree.treespec_leaf()
    name, context, children = data
    kind = _BY_NAME.get(name) or _registered(name) or _loaded(name)
    if kind is None or kind.__module__ == "collections" and name not in _BY_NAME:
        raise ValueError(f"{name!r} is not a registered container")
    return pytree.TreeSpec(kind, _context_in(context), [read(child) for child in children])


def _context_out(value: Any) -> Any:
    """Lists stay lists, tuples become {"": ...}."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_context_out(item) for item in value]
    if type(value) is tuple:
        return {"": [_context_out(item) for item in value]}
    raise NotKept(f"a container has the key {value!r}")


def _context_in(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_context_in(item) for item in value[""])
    return [_context_in(item) for item in value] if isinstance(value, list) else value
