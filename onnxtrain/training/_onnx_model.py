"""What an ORTTrainer trains, of an onnx.ModelProto: its float initializers are the weights.

Same methods as TorchModel of _models.py. Used by _trainer_step.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from onnxtrain import _onnx_functions, _report
from onnxtrain._export.exported import Exported, GraphInput, GraphOutput
from onnxtrain._onnx_functions import nodes_of
from onnxtrain.backend import _to_tensor
from onnxtrain.export import SMALL_CONSTANT
from onnxtrain.ortmodule._program import Program
from onnxtrain.training._saved import Described, tensor_proto

if TYPE_CHECKING:
    from onnxtrain.training._reducer import Reducer

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_IN_HALF = ("MatMul", "Gemm", "Conv", "ConvTranspose")
_FALSE = "onnxtrain_evaluation"


class OnnxModel:
    """A ModelProto with weights as parameters.

    Every float initializer is a weight, but for the running statistics of BatchNormalization, which are buffers and are
    updated where a node is in training mode. In evaluation no Dropout drops anything, and BatchNormalization uses the
    running statistics.

    Args:
        model: with its weights inside; it is not changed.
        inputs, outputs: descriptions. Inputs are found by name; outputs too, or by position where a name is no
            output's.
        mixed_precision: whether matrix products and convolutions of float32 are computed in float16.

    Raises:
        ValueError: a described input is not the model's, one of the model's is not described, or there are fewer
            outputs than are described.
        UnsupportedError: the engine lacks an operator.
    """

    def __init__(self, model: onnx.ModelProto, inputs: Sequence[Described], outputs: Sequence[Described],
                 mixed_precision: bool = False) -> None:
        self._mixed_precision = mixed_precision
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        graph = self.model.graph
        initialized = {tensor.name for tensor in graph.initializer}
        users = [value.name for value in graph.input if value.name not in initialized]
        described = [item[0] for item in inputs]
        if set(users) - set(described):
            raise ValueError(f"the model has inputs {users}, but the description names {described}")
        known = [output.name for output in graph.output]
        self._outputs: list[Any] = [item[0] if item[0] in known else known[place] if place < len(known) else None
                                    for place, item in enumerate(outputs)]
        if None in self._outputs:
            raise ValueError(f"the model has outputs {known}, but the description names {[o[0] for o in outputs]}")
        self._users = [(name, described.index(name)) for name in users]
        statistics = {name for node in nodes_of(graph.node) if node.op_type == "BatchNormalization"
                      for name in node.input[3:5]}
        self._holder = torch.nn.Module()
        self._names: dict[str, str] = {}  # weight or buffer -> its name in the holder, which has no dots
        self._constants: dict[str, Tensor] = {}
        for place, tensor in enumerate(graph.initializer):
            value = _to_tensor(numpy_helper.to_array(tensor), tensor.name)
            if tensor.data_type not in _FLOATS:
                if value.numel() > SMALL_CONSTANT:
                    self._constants[tensor.name] = value
                continue
            self._names[tensor.name] = f"w{place}"
            if tensor.name in statistics:
                self._holder.register_buffer(f"w{place}", value)
            else:
                self._holder.register_parameter(f"w{place}", torch.nn.Parameter(value))
        self._counters = _report.Counters()
        self._programs: dict[bool, Program] = {}
        self._latest: Program | None = None
        self._reducer: Reducer | None = None

    # ---- weights ----

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All weights, frozen ones included, under the names of their initializers."""
        own = self._holder._parameters
        return {name: own[held] for name, held in self._names.items() if held in own}  # type: ignore[misc]

    def buffers(self) -> dict[str, Tensor]:
        """The running statistics of BatchNormalization."""
        own = self._holder._buffers
        return {name: own[held] for name, held in self._names.items() if held in own}  # type: ignore[misc]

    def to(self, device: torch.device) -> None:
        """Moves the weights there."""
        self._holder.to(device)
        self._constants = {name: value.to(device) for name, value in self._constants.items()}

    def deliver_to(self, reducer: Reducer) -> None:
        """From now on the engine writes gradients where this Reducer says. No step has been run yet."""
        self._reducer = reducer

    # ---- running ----

    def __call__(self, inputs: Sequence[object], read: Iterable[int] | None = None) -> list[Tensor]:
        """The outputs in training, under autograd; all of them, whichever are read."""
        return self._run(inputs, True)

    def evaluate(self, inputs: Sequence[object]) -> list[Tensor]:
        """The outputs in evaluation."""
        with torch.no_grad():
            return self._run(inputs, False)

    def _run(self, inputs: Sequence[object], training: bool) -> list[Tensor]:
        missing = [name for name, place in self._users if place >= len(inputs)]
        if missing:
            raise ValueError(f"inputs are missing: {', '.join(missing)}")
        if training not in self._programs:
            self._programs[training] = self._program(training)
        self._latest = self._programs[training]
        results = self._latest([inputs[place] for _, place in self._users], training)
        _report.engine_step(self._counters)
        return list(results)

    def latest(self) -> Program | None:
        """The program of the latest step."""
        return self._latest

    def cuts(self) -> list[str]:
        """An ONNX model is one graph."""
        return []

    def _program(self, training: bool) -> Program:
        """The graph in one mode, its weights as inputs."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        graph = model.graph
        if not training:
            evaluate(model)
        if self._mixed_precision:
            _in_half(graph, model)
        updated = _updated_statistics(graph, self.buffers()) if training else {}
        sources = [GraphInput("user", name, leaf) for leaf, (name, _) in enumerate(self._users)]
        for name, held in self._names.items():
            sources.append(GraphInput("parameter" if held in self._holder._parameters else "buffer", name, held))
        sources += [GraphInput("constant", name, value) for name, value in self._constants.items()]
        weights_as_inputs(graph, [source.name for source in sources])
        targets = [GraphOutput("user", name, leaf) for leaf, name in enumerate(self._outputs)]
        targets += [GraphOutput("buffer", value, self._names[name]) for name, value in updated.items()]
        give_out(graph, targets)
        exported = Exported(_onnx_functions.inline(model).SerializeToString(), tuple(sources), tuple(targets),
                            len(self._outputs), lambda _: None, model.opset_import[0].version, {}, [])
        device = next(iter([*self._holder.parameters(), *self._holder.buffers()]), torch.empty(0)).device
        program = Program(self._holder, exported, device=str(device))
        program.in_backward = self._reducer
        _report.register(program)
        return program

    # ---- as ONNX ----

    def proto(self) -> onnx.ModelProto:
        """The model in evaluation, with the weights as they are."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        values = {**self.parameters(), **self.buffers()}
        for tensor in model.graph.initializer:
            if tensor.name in values:
                tensor.CopyFrom(tensor_proto(values[tensor.name], tensor.name))
        evaluate(model)
        return model


def evaluate(model: onnx.ModelProto) -> None:
    """Makes Dropout drop nothing, and BatchNormalization use its running statistics."""
    graph = model.graph
    constant = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if not tensor.dims}
    constant |= {node.output[0]: numpy_helper.to_array(node.attribute[0].t) for node in nodes_of(graph.node)
                 if node.op_type == "Constant" and node.attribute[0].name == "value"}
    changed = False
    for node in nodes_of(graph.node):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Dropout" and len(node.input) > 2 and bool(constant.get(node.input[2], np.array(True))):
            node.input[2] = _FALSE
            changed = True
        if node.op_type == "BatchNormalization":
            kept = [a for a in node.attribute if a.name != "training_mode"]
            if len(kept) < len(node.attribute):
                del node.attribute[:]
                node.attribute.extend(kept)
                del node.output[1:]
    if changed and not any(tensor.name == _FALSE for tensor in graph.initializer):
        graph.initializer.append(helper.make_tensor(_FALSE, onnx.TensorProto.BOOL, [], [False]))


def _in_half(graph: onnx.GraphProto, model: onnx.ModelProto) -> None:
    """Casts the operands of matrix products and convolutions to float16, and their results back to float32."""
    known = onnx.shape_inference.infer_shapes(model).graph
    values = (*known.value_info, *known.input, *known.output)
    dtypes = {value.name: value.type.tensor_type.elem_type for value in values}
    dtypes |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    nodes, made = [], set()

    def cast(source: str, target: str, dtype: int) -> None:
        nodes.append(helper.make_node("Cast", [source], [target], to=dtype))

    for node in graph.node:
        operands = [name for name in node.input if name]
        if (node.op_type not in _IN_HALF or node.domain not in ("", "ai.onnx")
                or any(dtypes.get(name) != onnx.TensorProto.FLOAT for name in operands)):
            nodes.append(node)
            continue
        for name in operands:
            if name not in made:
                made.add(name)
                cast(name, f"{name}_onnxtrain_half", onnx.TensorProto.FLOAT16)
        half = onnx.NodeProto()
        half.CopyFrom(node)
        half.input[:] = [f"{name}_onnxtrain_half" if name else "" for name in node.input]
        half.output[0] = f"{node.output[0]}_onnxtrain_half_result"
        nodes.append(half)
        cast(half.output[0], node.output[0], onnx.TensorProto.FLOAT)
    del graph.node[:]
    graph.node.extend(nodes)


def _updated_statistics(graph: onnx.GraphProto, buffers: dict[str, Tensor]) -> dict[str, str]:
    """Running statistic -> the value that it has after a step."""
    found = {}
    for node in graph.node:
        if node.op_type == "BatchNormalization" and len(node.output) > 1:
            found.update({name: value for name, value in zip(node.input[3:5], node.output[1:3])
                          if name in buffers and value})
    return found


def weights_as_inputs(graph: onnx.GraphProto, names: Sequence[str]) -> None:
    """Makes these the graph's inputs, in this order; the other initializers stay."""
    given = {value.name: value for value in graph.input}
    for tensor in graph.initializer:
        if tensor.name not in given:
            given[tensor.name] = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
    kept = [tensor for tensor in graph.initializer if tensor.name not in set(names)]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(kept)
    graph.input.extend(given[name] for name in names)


def give_out(graph: onnx.GraphProto, targets: Sequence[GraphOutput]) -> None:
    """Makes these values the graph's outputs, in this order."""
    known = {value.name: value for value in (*graph.value_info, *graph.output)}
    wanted = [known.get(target.name, onnx.ValueInfoProto(name=target.name)) for target in targets]
    wanted = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in wanted]
    del graph.output[:]
    graph.output.extend(wanted)
