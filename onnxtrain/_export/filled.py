"""transformers' caches of keys and values: objects among the arguments that forward fills, and hands back.

A trace sees copies of them. What it leaves in them becomes outputs of the graph, which each step puts into the caller's
own object; a result that is such an object is that very one. Used by export.py and ortmodule/_program.py; trees.py
takes caches apart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain._export import trees


@dataclasses.dataclass(frozen=True)
class Filled:
    """What one cache holds after forward: leaves are tensors of the graph, leaves of the input, or constants."""

    index: int  # among the caches of a call
    spec: pytree.TreeSpec
    tensors: tuple[int, ...]
    same: dict[int, int]
    constants: dict[int, Any]


def among(arguments: Any) -> list[Any]:
    """The caches in a structure, in order; those inside others are theirs."""
    kinds = trees.cache_kinds()
    if not kinds:
        return []
    leaves = pytree.tree_leaves(arguments, is_leaf=lambda value: isinstance(value, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


class Watch:
    """The caches of one call while it is traced."""

    def __init__(self, arguments: Any) -> None:
        self._caches = among(arguments)
        self._before = [trees.flatten(cache) for cache in self._caches]
        self._own = {id(leaf): i for i, leaf in enumerate(pytree.tree_leaves(arguments))
                     if isinstance(leaf, torch.Tensor)} if self._caches else {}

    def index(self, value: Any) -> Any:
        """Which of the caches a value is; None for any other."""
        return next((i for i, cache in enumerate(self._caches) if cache is value), None)

    def holds(self, value: Any) -> bool:
        return self.index(value) is not None

    def take(self) -> tuple[list[Filled], list[torch.Tensor]]:
        """What forward left in them, and the tensors of that; they are as before afterwards."""
        filled, tensors = [], []
        for index, (cache, (old, old_spec)) in enumerate(zip(self._caches, self._before)):
            leaves, spec = trees.flatten(cache)
            if spec == old_spec and all([_is_same(a, b) for a, b in zip(leaves, old)]):
                continue
            merge(cache, pytree.tree_unflatten(old, old_spec))
            same = {i: self._own[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in self._own}
            made = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and i not in same]
            constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
            filled.append(Filled(index, spec, tuple(made), same, constants))
            tensors += [leaves[i].clone() for i in made]
        return filled, tensors


def _is_same(a: Any, b: Any) -> bool:
    return a is b or not isinstance(a, torch.Tensor) and type(a) is type(b) and a == b


def put_back(caches: Sequence[Any], filled: Sequence[Filled], made: dict[tuple[int, int], torch.Tensor],
             leaves: Sequence[Any]) -> None:
    """Has the caller's caches hold what forward would have left in them.

    Args:
        made: tensors of the step by (cache, leaf).
        leaves: of the call.
    """
    for each in filled:
        held: list[Any] = [each.constants.get(i) for i in range(each.spec.num_leaves)]
        for i in each.tensors:
            held[i] = made[each.index, i]
        for i, leaf in each.same.items():
            held[i] = leaves[leaf]
        merge(caches[each.index], pytree.tree_unflatten(held, each.spec))


_ABSENT = object()


def merge(old: Any, new: Any) -> Any:
    """`old` with the contents of `new`, where both are containers of one kind, down to the leaves; else `new`."""
    if type(old) is not type(new):
        return new
    if isinstance(old, trees.cache_kinds(parts=True)):
        merge(vars(old), vars(new))
    elif type(old) is dict:
        items = {key: merge(old.get(key, _ABSENT), value) for key, value in new.items()}
        old.clear()
        old.update(items)
    elif type(old) is list:
        old[:] = [merge(a, b) for a, b in itertools.zip_longest(old[:len(new)], new, fillvalue=_ABSENT)]
    else:
        return new
    return old
