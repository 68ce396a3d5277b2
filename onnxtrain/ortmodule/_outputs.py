"""Which of a module's results its caller reads in training: the others are None then, and are not computed.

The choice is made inside the function that Dynamo captures, behind the call of the module, so that no graph has what
was for the other results alone. It is written in what Dynamo follows. Used by _module.py and _captured.py.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

Wanted = tuple[str | int, ...]  # names and positions; empty: all results
LEAST_SHARE, LEAST_BYTES = 0.1, 1 << 20  # of a step's memory, that results beside the loss take to be spoken of


def wanted_of(outputs: str | int | Iterable[str | int]) -> Wanted:
    """What a caller wrote as `outputs`, as a tuple. Raises TypeError for what is no name and no position."""
    wanted: Any = (outputs,) if isinstance(outputs, (str, int)) else outputs
    wanted = tuple(wanted) if isinstance(wanted, Iterable) else (wanted,)
    for item in wanted:
        if not isinstance(item, (str, int)) or isinstance(item, bool):
            raise TypeError("ORTModule(outputs=) takes names or positions of the results that are read in training, "
                            f"not {item!r}")
    return wanted


def chosen(result: object, wanted: Wanted) -> object:
    """A copy of a module's result with None in place of what is not wanted.

    The result itself is returned where it is one tensor, and where nothing of what is wanted is there: a model of
    transformers that gets no labels has no loss.

    Raises:
        ValueError: a name or a position is none of the result's, or the result has neither.
    """
    if result is None or isinstance(result, torch.Tensor):
        return result
    items = _items(result)
    kept = _kept(result, items, wanted)
    if all([value is None for key, value in items if key in kept]):
        return result
    kind: Any = type(result)
    values = [value if key in kept else None for key, value in items]
    if kind in (tuple, list):
        return kind(values)
    if isinstance(result, tuple):
        return kind(*values)
    if not dataclasses.is_dataclass(result):
        return kind([(key, value) for (key, _), value in zip(items, values)])
    if isinstance(result, dict):  # a ModelOutput of transformers, which leaves out fields that are None from the first
        made = kind(**dict(items))
        for key in [key for key, _ in items if key not in kept]:
            made[key] = None
        return made
    made = copy.copy(result)
    for key in [key for key, _ in items if key not in kept]:
        object.__setattr__(made, key, None)  # frozen ones too
    return made


def _items(result: Any) -> list[tuple[Any, object]]:
    """Names, or else positions, and what they stand for."""
    if type(result) in (tuple, list):
        return list(enumerate(result))
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return list(zip(result._fields, result))
    if type(result) in (dict, collections.OrderedDict) or isinstance(result, dict) and dataclasses.is_dataclass(result):
        return list(result.items())
    if dataclasses.is_dataclass(result) and not isinstance(result, (dict, tuple)):
        return [(field.name, getattr(result, field.name)) for field in dataclasses.fields(result)]
    raise ValueError("ORTModule(outputs=) chooses from a tuple, list, namedtuple, dict or dataclass, and forward "
                     f"returns an object of the class {type(result).__name__}")


def _kept(result: object, items: list[tuple[Any, object]], wanted: Wanted) -> Sequence[str | int]:
    """The keys of what is wanted: by names where the result has names and some are given, else by positions."""
    names = [item for item in wanted if isinstance(item, str)]
    places = [item for item in wanted if not isinstance(item, str)]
    keys = [key for key, _ in items]
    known = list(keys)
    if dataclasses.is_dataclass(result):  # fields that are None are no keys of a ModelOutput
        known += [field.name for field in dataclasses.fields(result) if field.name not in keys]
    if names and type(result) not in (tuple, list):
        wrong: Sequence[str | int] = [name for name in names if name not in known]
        kept: Sequence[str | int] = names
    else:
        wrong = [place for place in places if not -len(keys) <= place < len(keys)] if places else list(names)
        kept = [keys[place] for place in places if place not in wrong]
    if wrong:
        raise ValueError(f"ORTModule(outputs=): {', '.join(map(repr, wrong))} is no result of the module. It returns a "
                         f"{type(result).__name__} of {', '.join(map(repr, known))}: give one of these")
    return kept


def beside_loss(results: Iterable[object], totals: dict[str, float]) -> str:
    """What the results of a training step beside its loss cost, in words; "" where there is no loss, or that is little.

    Args:
        results: of a graph.
        totals: Program.totals().
    """
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    others = [result for result in tensors if not (result.dim() == 0 and result.requires_grad)]
    taken = sum(result.nbytes for result in others)
    whole = taken + totals.get("slab_bytes", 0)
    if len(others) == len(tensors) or taken < max(LEAST_BYTES, LEAST_SHARE * whole):
        return ""
    return (f"results beside the loss take {taken / 2**20:.1f} MiB, {taken / whole:.0%} of a step's activations and "
            "results")
