"""A module whose exported graphs a function of the user's changes before they are trained, run and saved:
ORTTrainerOptions' extra_postprocess, and _extra_postprocess of the older form.

Used by orttrainer.py. The function gets what save_as_onnx would write, but for the operators that make
training and random numbers; the engine differentiates what the function leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import Tensor

from onnxtrain import _onnx_functions, _report
from onnxtrain._export.exported import Exported
from onnxtrain._onnx_functions import nodes_of
from onnxtrain.ortmodule._device import device_of
from onnxtrain.ortmodule._program import Program
from onnxtrain.training import _saved
from onnxtrain.training._models import TorchModel
from onnxtrain.training._onnx_model import give_out, weights_as_inputs
from onnxtrain.training._opset import converted, version_of

if TYPE_CHECKING:
    from onnxtrain.training._reducer import Reducer

Change = Callable[[onnx.ModelProto], onnx.ModelProto | None]
MOST_PROGRAMS = 64  # that are kept; each has the sizes of its inputs


def applied(change: Change | None, model: onnx.ModelProto) -> onnx.ModelProto:
    """What the function makes of the model: what it returns, or where that is None the model, which it has changed.

    Raises:
        AssertionError: it returned something else.
    """
    changed = model if change is None else change(model)
    if changed is not None and not isinstance(changed, onnx.ModelProto):
        raise AssertionError("'extra_postprocess' must give an onnx.ModelProto, or change the one that it gets; it "
                             f"gave a {type(changed).__name__}")
    return model if changed is None else changed


def torch_model(change: Change | None, *args: Any, **kwargs: Any) -> TorchModel:
    """A TorchModel of these arguments, whose graphs the function changes where there is one."""
    return TorchModel(*args, **kwargs) if change is None else PostprocessedModel(change, *args, **kwargs)


class PostprocessedModel(TorchModel):
    """A TorchModel whose graphs a function has changed.

    The module is exported as one graph for each set of input sizes and modes of its submodules, and nothing of it runs
    in PyTorch. What the module's own attributes say is as at the first such call.

    Args:
        change: see applied(). It is called once for each graph, and for each file. Weights are initializers under the
            module's names, and stay the module's: values that it gives them are an error.
        The others are TorchModel's.
    """

    def __init__(self, change: Change, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._change = change
        self._programs: dict[tuple[object, ...], Program] = {}
        self._latest: Program | None = None
        self._reducer: Reducer | None = None

    def deliver_to(self, reducer: Reducer) -> None:
        """From now on the engine writes gradients where this Reducer says. No step has been run yet."""
        self._reducer = reducer

    def latest(self) -> Program | None:
        """The program of the latest step."""
        return self._latest

    def proto(self) -> onnx.ModelProto:
        """TorchModel.proto(), changed by the function."""
        return applied(self._change, super().proto())

    def __call__(self, inputs: Sequence[object], read: Iterable[int] | None = None) -> list[Any]:
        """All outputs in training, under autograd: the function may have changed what any of them is."""
        return super().__call__(inputs)

    def _run(self, inputs: Sequence[object]) -> Iterable[Any]:
        device = device_of([*(value for value in inputs if isinstance(value, Tensor)), *self._composed.parameters()])
        kind = device.split(":")[0]
        key = (tuple([module.training for module in self._composed.modules()]), device,
               torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind),
               tuple([(value.shape, value.dtype) if isinstance(value, Tensor) else value for value in inputs]))
        if key not in self._programs:
            exported = self._changed(_saved.exported_of(self._composed, inputs, self._opset))
            program = Program(self._composed, exported, device=device, memory=self.ort_module._runtime.memory())
            program.in_backward = self._reducer
            _report.register(program)
            self._programs[key] = program
            if len(self._programs) > MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        self._latest = self._programs[key]
        results = self._latest(list(inputs), torch.is_grad_enabled())
        _report.engine_step(self.ort_module._counters)
        return results

    def _changed(self, exported: Exported) -> Exported:
        """The export after the function.

        Raises:
            ValueError: the function gave a weight another value, or took an input or output away, or added one.
            UnsupportedError: the graph has operators that the opset does not have.
        """
        model, names = _saved.named(self._composed, exported, self._own, self._inputs, self._outputs)
        model = converted(model, self._opset)
        before = {tensor.name: tensor.SerializeToString() for tensor in model.graph.initializer}
        model = onnx.ModelProto.FromString(applied(self._change, model).SerializeToString())  # the function may keep it
        graph = model.graph
        sources = [dataclasses.replace(source, name=names.get(source.name, source.name)) for source in exported.inputs]
        targets = [dataclasses.replace(target, name=names.get(target.name, target.name)) for target in exported.outputs
                   if target.kind != "user" or target.target < len(self._outputs)]
        weights = {source.name for source in sources if source.kind in ("parameter", "buffer")}
        for tensor in graph.initializer:
            if tensor.name in weights and tensor.SerializeToString() != before[tensor.name]:
                raise ValueError(f"the function that changes the graph gave {tensor.name} another value: set the "
                                 "module's, which is what is trained")
        given = {value.name for value in (*graph.input, *graph.initializer)}
        known = given | {name for node in nodes_of(graph.node) for name in node.output}
        wrong = {value.name for value in graph.input} - {source.name for source in sources}
        wrong |= {target.name for target in targets} - known
        if wrong:
            raise ValueError(f"the function that changes the graph took away, or added, {', '.join(sorted(wrong))}: "
                             "inputs and outputs have to stay")
        sources = [source for source in sources if source.name in given]
        weights_as_inputs(graph, [source.name for source in sources])
        give_out(graph, targets)
        return dataclasses.replace(exported, model=_onnx_functions.inline(model).SerializeToString(),
                                   inputs=tuple(sources), outputs=tuple(targets),
                                   results=min(exported.results, len(self._outputs)), opset=version_of(model))
