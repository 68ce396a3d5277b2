"""A module as one graph, which Dynamo captures from end to end, for files.

Used by training/_saved.py. A file is a snapshot: nothing is guarded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain._export import state
from onnxtrain._export.captured import Graph, graph_of, places_of
from onnxtrain._export.errors import ExportError
from onnxtrain._export.exported import Exported, GraphInput
from onnxtrain._torch import assert_async
from onnxtrain.export import export
from onnxtrain.ortmodule._captured import CAPTURE, CONTENTS, capturing, entry, follow_masks
from onnxtrain.ortmodule._forget import forget


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors of a result, in order, through containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[object] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = vars(value).values()
    for part in parts:
        yield from tensors_of(part)


def export_whole(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], *,
                 opset: int = 20) -> Exported:
    """An export of one call of the module, in the modes that it and torch are in.

    The module runs once, in PyTorch; its attributes, its buffers and the random state are as before afterwards. "user"
    inputs and outputs are numbered as tensors_of() has those of (args, kwargs) and of the result.

    Raises:
        ExportError: Dynamo cuts the graph, a result is none of the graph's, or torch cannot export it.
    """
    graph, inputs, own, wanted = _captured(module, args, kwargs)
    exported = export(graph, inputs, opset=opset, for_file=True)
    given = {id(tensor): i for i, tensor in enumerate(tensors_of((args, kwargs)))}
    places = {id(tensor): i for i, tensor in enumerate(own)}
    if any([id(tensor) not in places for tensor in wanted]):
        raise ExportError("The graph does not compute one of the module's results: it may be an argument or a weight.")
    targets = {target.target: target for target in exported.outputs if target.kind == "user"}
    if len({id(tensor) for tensor in wanted}) < len(wanted) or any(
            [places[id(tensor)] not in targets for tensor in wanted]):
        raise ExportError("A result of the module is another result, or a view of one, of an argument or a weight, "
                          "which a file cannot express.")

    def placed(source: GraphInput) -> GraphInput:
        if source.kind != "user":
            return source
        tensor = inputs[source.target]
        if id(tensor) in given:
            return dataclasses.replace(source, target=given[id(tensor)])
        return dataclasses.replace(source, kind="constant", target=tensor)  # of an attribute, or a global

    outputs = [dataclasses.replace(targets[places[id(tensor)]], target=i) for i, tensor in enumerate(wanted)]
    return dataclasses.replace(exported, inputs=tuple(map(placed, exported.inputs)), results=len(wanted),
                               outputs=(*outputs, *(o for o in exported.outputs if o.kind != "user")))


def _captured(module: torch.nn.Module, args: tuple[object, ...],
              kwargs: dict[str, object]) -> tuple[Graph, Sequence[object], Sequence[Tensor], list[Tensor]]:
    """The graph, its arguments and results in this call, and the tensors of the call's result."""
    from onnxtrain import dynamo

    found: list[Any] = []

    def backend(operations: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        for node in list(operations.graph.nodes):
            if node.target is assert_async:  # a file has no such outputs
                operations.graph.erase_node(node)
        ready = dynamo.prepared(operations, constants=True)

        def call(*given: object) -> object:
            inputs = ready.inputs(given)
            results = ready.graph.forward(*inputs)
            found.append((ready.graph, inputs, places_of(module, inputs), results))
            return ready.numbers.put_back(results, given) if ready.numbers else results

        return call

    follow_masks()
    called, fast = entry(), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused operators have no translation
    try:
        with state.unchanged(module), state.random_unchanged(), state.private_buffers(module), \
                capturing(args, kwargs, CAPTURE | CONTENTS | {"suppress_errors": False}):
            result = torch.compile(called, backend=backend, fullgraph=True)(module, *args, **kwargs)
    except Exception as error:
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise ExportError(f"Dynamo does not capture the module as one graph: {reason}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        forget(called.__code__)
    if len(found) != 1:
        raise ExportError("Dynamo captured no tensor operations of the module.")
    operations, inputs, places, results = found[0]
    graph = graph_of(module, operations, places)
    return graph, [value for value, held in zip(inputs, places) if not held], results, list(tensors_of(result))
