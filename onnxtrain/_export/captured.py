"""A graph that Dynamo captured, as a module with the user's own parameters and buffers, which can be exported."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Place = tuple[dict[str, Any], str]  # of a tensor in a module: _parameters or _buffers, and its name there


class Graph(torch.nn.Module):
    """Operations that Dynamo captured, as a module with the parameters and buffers of the user's, under their names.

    Args:
        module: the user's.
        operations: takes parameters and buffers as arguments.
        places: for each argument of `operations` every place in `module` that holds it; empty for those that are
            arguments of the Graph.
    """

    def __init__(self, module: torch.nn.Module, operations: torch.fx.GraphModule,
                 places: Sequence[Sequence[Place]]) -> None:
        super().__init__()
        for store in ("_parameters", "_buffers", "_modules"):  # the very dicts, so that a new value is seen
            self.__dict__[store] = module.__dict__[store]
        self.__dict__.update(_user=module, _operations=operations, _places=tuple(places))

    @property
    def training(self) -> bool:
        """The user's module's: a graph that depends on it is guarded."""
        return self._user.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_user" in self.__dict__:
            self._user.training = mode

    @classmethod
    def of(cls, module: torch.nn.Module, operations: torch.fx.GraphModule,
           places: Sequence[Sequence[Place]]) -> Graph:
        """One whose class has the name of the user's, for what is said of it."""
        graph = type(type(module).__name__, (cls,), {})(module, operations, places)
        graph.__dict__["forward"] = _named(graph.forward, _names(module, operations, places))
        return graph

    def own_modules(self) -> list[torch.nn.Module]:
        """Those that are none of the user's."""
        return [self, *self._operations.modules()]

    @property
    def text(self) -> str | None:
        """All that the graph computes; None where it holds tensors, modules or functions that no text stands for."""
        for node in self._operations.graph.nodes:
            function = node.target if isinstance(node.target, types.FunctionType) else None
            if node.op in ("get_attr", "call_module") or function is not None and (
                    function.__closure__ or function.__module__.split(".")[0] not in ("torch", "onnxtrain")):
                return None
        return self._operations.code

    def forward(self, *args: Any) -> Any:
        given = iter(args)
        return self._operations.forward(*[held[0][0][held[0][1]] if held else next(given) for held in self._places])


def _names(module: torch.nn.Module, operations: torch.fx.GraphModule,
           places: Sequence[Sequence[Place]]) -> list[str]:
    """For each argument of a graph the name of the user's argument that it is, or is a part of."""
    try:
        positional = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        positional = []
    names: list[str] = []
    for node, held in zip((node for node in operations.graph.nodes if node.op == "placeholder"), places):
        if held:
            continue
        name = str(node.target).removeprefix("L_").removesuffix("_")
        if (found := re.match(r"args_(\d+)(?!\d)", name)) and int(found[1]) < len(positional):
            name = positional[int(found[1])] + name[found.end():]
        name = name.removeprefix("kwargs_")
        names.append(name if name.isidentifier() and name not in names else f"input_{len(names)}")
    return names


def _named(forward: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return forward(*args)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore
    return call


def places_of(module: torch.nn.Module, inputs: Sequence[Any]) -> list[list[Place]]:
    """For each input of a graph the places where the module holds it; none for what is no parameter or buffer."""
    held: dict[int, list[Place]] = {}
    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    held.setdefault(id(tensor), []).append((store, name))
    return [held.get(id(value), []) if isinstance(value, Tensor) else [] for value in inputs]
