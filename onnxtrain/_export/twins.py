"""One export for graphs of the same operations with other weights, such as those of equal layers between cuts.

Used by ortmodule/_module.py for the graphs of one ORTModule; the weights are inputs of an exported graph in any case,
so that another layer's take their places under other names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from torch import Tensor

from onnxtrain._export.captured import Graph
from onnxtrain._export.exported import Exported


class Twins:
    """The exports of a module's graphs, by what the graphs compute."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[tuple[list[list[str]], Exported]]] = {}

    def keep(self, graph: Graph, how: tuple[Any, ...], exported: Exported) -> None:
        """Notes an export of a graph. `how` is all that it depends on besides: the kind of call, the device."""
        if _is_general(exported):
            operations = graph._captured
            self._known.setdefault((operations.computes(), how), []).append((operations.names(), exported))

    def find(self, graph: Graph, how: tuple[Any, ...], tensors: Sequence[Tensor]) -> Exported | None:
        """The export of such a graph for these sizes, with this one's weights; None where there is none."""
        own = graph._captured.names()
        for names, exported in self._known.get((graph._captured.computes(), how), ()):
            if names != own and exported.guards(tensors) is None:  # those of the graph itself did not serve it
                return _renamed(exported, {old: new for before, now in zip(names, own, strict=True)
                                           for old, new in zip(before, now, strict=True)})
        return None


def _is_general(exported: Exported) -> bool:
    """Whether nothing but names of weights ties an export to its graph."""
    return (not (exported.needs_verification or exported.views)
            and all(source.kind in ("parameter", "buffer", "user") for source in exported.inputs))


def _renamed(exported: Exported, names: Mapping[str, str]) -> Exported:
    inputs = {source.name: names.get(source.target, source.name) for source in exported.inputs
              if source.kind != "user" and source.name == source.target}
    model = onnx.load_from_string(exported.model)
    if {value.name for node in model.graph.node for value in node.attribute if value.HasField("g")}:
        inputs = {}  # branches read the names of the graph around them
    for value in model.graph.input:
        value.name = inputs.get(value.name, value.name)
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = inputs.get(name, name)

    def placed(part: Any) -> Any:
        target = names.get(part.target, part.target) if part.kind in ("parameter", "buffer") else part.target
        return dataclasses.replace(part, name=inputs.get(part.name, part.name), target=target)

    return dataclasses.replace(
        exported, model=model.SerializeToString(), inputs=tuple(map(placed, exported.inputs)),
        outputs=tuple(map(placed, exported.outputs)), seconds={"total": 0.0}, notes=[*exported.notes])
