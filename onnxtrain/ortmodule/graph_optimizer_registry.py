"""register_graph_optimizer: functions of the user's that change an exported graph before the engine differentiates it.

Called by _program.py. Upstream gives such a function the graph with its gradients; here they are made later, from the
graph that the function leaves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TypeVar

import onnx

Function = TypeVar("Function", bound=Callable[[onnx.GraphProto], None])


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    function: Callable[[onnx.GraphProto], None]
    modules: frozenset[str]  # empty: all
    devices: frozenset[str]
    priority: int

    def takes(self, module: str, device: str) -> bool:
        return (not self.modules or module in self.modules) and (not self.devices or device in self.devices)


_optimizers: list[_Optimizer] = []


def _names(text: str) -> frozenset[str]:
    return frozenset() if text == "all" else frozenset(re.split(r"\s*[|,]\s*", text.strip()))


def register_graph_optimizer(target_modules: str = "all", devices: str = "all",
                             priority: int = 0) -> Callable[[Function], Function]:
    """Decorator of a function that takes the GraphProto of a module's forward and changes it.

    It is called once for each graph that is exported from then on. The names of the graph's inputs and outputs stay.

    Args:
        target_modules: names of the classes of modules that it is for, separated by "|"; "all".
        devices: "cpu", "cuda", or both separated by "|"; "all".
        priority: functions of a higher one are called first; equal ones in the order of their registration.
    """

    def register(function: Function) -> Function:
        _optimizers.append(_Optimizer(function, _names(target_modules), _names(devices), priority))
        return function

    return register


def applied(model: bytes, module: str, device: str) -> bytes:
    """The model after every registered function that is for this class of module and this device.

    Raises:
        ValueError: a function changed the names of inputs or outputs.
    """
    chosen = [optimizer for optimizer in _optimizers if optimizer.takes(module, device.split(":")[0])]
    if not chosen:
        return model
    proto = onnx.ModelProto.FromString(model)

    def ends() -> list[list[str]]:
        return [[value.name for value in values] for values in (proto.graph.input, proto.graph.output)]

    before = ends()
    for optimizer in sorted(chosen, key=lambda each: -each.priority):
        optimizer.function(proto.graph)
        if ends() != before:
            raise ValueError(f"the graph optimizer {optimizer.function.__qualname__} changed the names of the graph's "
                             f"inputs or outputs from {before} to {ends()}")
    return proto.SerializeToString()
