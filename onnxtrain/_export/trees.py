"""Containers that torch's pytree does not know by itself: dataclasses, and subclasses of dict.

Called where a leaf turns up that is none. A class is registered once per process, after which torch.export and
ORTModule take its instances apart and build equal ones, without calling __init__ again.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any

from torch.utils import _pytree as pytree

_lock = threading.Lock()


def register(leaf: Any) -> bool:
    """Whether `leaf` is a container now that was none before."""
    kind = type(leaf)
    with _lock:
        if kind in pytree.SUPPORTED_NODES:
            return True  # by another thread
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, dict)):
            _register_dataclass(kind)
        elif isinstance(leaf, dict) and not getattr(leaf, "__dict__", None):
            _register_mapping(kind)
        else:
            return False
    return True


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """pytree.tree_flatten, with every class registered that can be."""
    while True:
        leaves, spec = pytree.tree_flatten(tree)
        if not any([register(leaf) for leaf in leaves if not isinstance(leaf, _COMMON)]):
            return leaves, spec


_COMMON = (type(None), bool, int, float, str)


def _register_dataclass(kind: type) -> None:
    """Every attribute that the instance holds, fields or not, in order; those that are not set are left so."""

    def names(value: Any) -> tuple[str, ...]:
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return tuple(dict.fromkeys((*fields, *getattr(value, "__dict__", ()))))

    def take_apart(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        held = names(value)
        return [getattr(value, name) for name in held], held

    def build(values: Any, held: tuple[str, ...]) -> Any:
        made = object.__new__(kind)
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
        made = base.__new__(kind)
        for key, value in zip(keys, values):
            base.__setitem__(made, key, value)
        return made

    def with_keys(value: Any) -> Any:
        return [(pytree.MappingKey(key), item) for key, item in value.items()], tuple(value)

    pytree.register_pytree_node(kind, take_apart, build, flatten_with_keys_fn=with_keys,
                                serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
                                to_dumpable_context=list, from_dumpable_context=tuple)
