"""Other functions in the place of torch's, in what this thread calls: nothing of torch is replaced for that.

A TorchFunctionMode sees each function of torch that is called, but not what torch's own Python calls in turn, as
F.multi_head_attention_forward calls F.scaled_dot_product_attention: the mode is off while one of its calls runs.
Such a function is therefore called as a copy, whose globals have our functions under torch's names. Used by rewrite.py,
and by ortmodule/_masks.py and _verify.py.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from onnxtrain._export.numbers import copied
from onnxtrain._torch import VF

Functions = Mapping[object, Callable[..., Any]]


class _Names:
    """torch's functions in C, as its Python has them by name, with others in the place of some."""

    def __init__(self, ours: Functions) -> None:
        self._ours = ours

    def __getattr__(self, name: str) -> Any:
        found = getattr(VF, name)
        return self._ours.get(found, found)


def with_copies(ours: Functions) -> dict[object, Callable[..., Any]]:
    """Functions in the place of others, and copies of torch's own Python functions that call them there."""
    found = dict(ours)
    for module in (F, torch.functional):
        scope = dict(vars(module))
        for name, value in vars(module).items():
            if value is VF:
                scope[name] = _Names(ours)
            elif callable(value) and not isinstance(value, type) and value in ours:
                scope[name] = ours[value]
            elif isinstance(value, types.FunctionType) and value.__globals__ is vars(module):
                copy = types.FunctionType(value.__code__, scope, value.__name__, value.__defaults__, value.__closure__)
                copy.__kwdefaults__ = value.__kwdefaults__
                found[value] = scope[name] = copy
    return found


class Instead(TorchFunctionMode):
    """While it is entered, functions are called in the place of others.

    Args:
        ours: by the function that is called; with_copies() gives all that is needed.
    """

    def __init__(self, ours: Functions) -> None:
        super().__init__()
        self._ours = ours

    def __torch_function__(self, func: Callable[..., object], types: Sequence[type], args: Sequence[object] = (),
                           kwargs: Mapping[str, object] | None = None) -> object:
        return self._ours.get(func, func)(*args, **(kwargs or {}))


def exchanged(graph: torch.fx.GraphModule, ours: Functions) -> torch.fx.GraphModule:
    """A copy of the graph of a branch or a loop's body, which no mode sees the calls of, with other functions in it."""
    made = copied(graph)
    for node in made.graph.nodes:
        if node.op == "call_function":
            node.target = ours.get(node.target, node.target)
    for name, part in made.named_children():
        if isinstance(part, torch.fx.GraphModule):
            setattr(made, name, exchanged(part, ours))
    made.recompile()
    return made
