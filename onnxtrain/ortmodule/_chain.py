"""A graph with calls of torch.autograd.Function in it: segments in the engine, the calls between them by autograd
itself.

Each segment is one autograd node, so saved tensors, contexts, hooks and needs_input_grad of the user's
functions are torch's business, and backward runs through segments and functions in autograd's order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from onnxtrain import _C
from onnxtrain._export import segments
from onnxtrain._export.autograd_functions import Call, only_draws
from onnxtrain.ortmodule import _random
from onnxtrain.ortmodule._gradient_reach import Reach


class Stage:
    """One segment: what an autograd node of the engine needs of a program."""

    def __init__(self, segment: segments.Segment, parameters: Container[str], device: str,
                 memory: Mapping[str, Any]) -> None:
        self.session = None
        if segment.model is not None:
            self.session = _C.Session(segment.model, device=device, torch_random=_random.as_torch(device),
                                      parameters=bytes([name in parameters for name in segment.inputs]), **memory)
        self.random = self.session is not None and self.session.random
        self.reach = Reach(segment.model) if segment.model is not None else None
        self.inputs, self.outputs, self.calls = segment.inputs, segment.outputs, segment.calls
        self.double = None  # torch knows no module that is this segment
        if self.session is not None:
            given = [name for name, _, _ in self.session.inputs]
            if given != self.inputs:
                raise ValueError(f"a segment has the inputs {given}, expected {self.inputs}")
        self._device = device

    def name(self, index: int, tensor: Tensor) -> str:
        """Of one input of the segment, which is this tensor in a call, for a message."""
        return f"input {self.inputs[index]}"

    def seed(self) -> int | torch.Generator:
        """What this run's dropout follows from."""
        return _random.seed(self.session, self._device)


class Chain:
    """All segments of a model, in order.

    Args:
        model: with PythonOp nodes.
        calls: by the nodes' keys.
        names, outputs: of the graph's inputs and outputs.
        parameters: those of the names that are the module's parameters.
        apply: (stage, mask, leaves of the call, tensors) -> outputs, under autograd.
        device: that the segments run on.
        memory: arguments of each segment's Session.

    Raises as Session does.
    """

    def __init__(self, model: bytes, calls: Sequence[Call], names: Sequence[str], outputs: Sequence[str],
                 parameters: Container[str], apply: Callable[..., Sequence[Tensor]], device: str = "cpu",
                 memory: Mapping[str, Any] = MappingProxyType({})) -> None:
        draws = {key for key, call in enumerate(calls) if only_draws(call)}
        self.draws = bool(draws)
        self.stages = [Stage(segment, parameters, device, memory) for segment in segments.cut(model, draws)]
        self.sessions = [stage.session for stage in self.stages if stage.session is not None]
        self.draws = self.draws or any(stage.random for stage in self.stages)  # other numbers when it runs again
        self._calls, self._names, self._outputs, self._apply = calls, names, outputs, apply

    def __call__(self, tensors: Sequence[Tensor], grad_enabled: bool) -> tuple[Tensor, ...]:
        """Tensors of the graph's inputs in, of its outputs out."""
        values: dict[str, Tensor] = dict(zip(self._names, tensors))
        for stage in self.stages:
            if stage.session is not None:
                given = [values[name] for name in stage.inputs]
                flags = bytes([grad_enabled and tensor.requires_grad for tensor in given])
                if any(flags):
                    made = self._apply(stage, flags, (), *given)
                else:
                    made, _ = stage.session.forward(given, flags, stage.seed())
                values.update(zip(stage.outputs, made))
            for call in stage.calls:
                results = self._calls[call.key]([values[name] for name in call.inputs])
                values.update({name: results[index] for index, name in call.outputs.items()})
        return tuple([values[name] for name in self._outputs])


class Run:
    """A run of all segments below one autograd node, so that create_graph can run the whole module again in PyTorch.

    Args:
        chain: what runs.
        mask: of the tensors that want a gradient.
        call: the arguments of the module's call.
        tensors: of the graph's inputs.

    Attributes:
        results: tensors of the graph's outputs, without a graph.
        differentiable: which of them have gradients.
    """

    def __init__(self, chain: Chain, mask: bytes, call: Sequence[object], tensors: Sequence[Tensor]) -> None:
        self.inputs, self.call = tensors, call
        self._versions = [tensor._version for tensor in tensors]
        self._leaves = [tensor.detach().requires_grad_(bool(flag)) for tensor, flag in zip(tensors, mask)]
        with torch.enable_grad():
            self._outputs = chain(self._leaves, True)
        self.results = tuple([output.detach() for output in self._outputs])
        self.differentiable = bytes([output.requires_grad for output in self._outputs])

    def changed(self) -> list[int]:
        """Which inputs were changed in place since forward."""
        return [i for i, (tensor, version) in enumerate(zip(self.inputs, self._versions)) if tensor._version != version]

    def backward(self, grads: Sequence[Tensor | None], keep: bool) -> list[Tensor | None]:
        """One gradient per input; `keep`: for a further backward."""
        given = [(output, grad) for output, grad in zip(self._outputs, grads)
                 if grad is not None and output.requires_grad]
        found: list[Tensor | None] = [None] * len(self._leaves)
        wanted = [i for i, leaf in enumerate(self._leaves) if leaf.requires_grad]
        if given:
            for i, grad in zip(wanted, torch.autograd.grad([output for output, _ in given],
                                                           [self._leaves[i] for i in wanted],
                                                           [grad for _, grad in given], keep, allow_unused=True)):
                found[i] = grad
        return found
