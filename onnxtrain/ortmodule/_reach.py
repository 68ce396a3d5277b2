"""Which gradients eager PyTorch would have given at all, where backward starts from some of the outputs, or at a
torch.cond.

The engine computes what its program has, with zeros for unused outputs; to an optimizer a gradient of zero
and no gradient are different things. Called by the autograd node of _program.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Reach:
    """From outputs of a graph to the inputs that they are made of; read off the model when first asked."""

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._made: dict[str, set[str]] | None = None
        self._stops: set[str] = set()  # values that no gradient passes
        self._known: dict[tuple[tuple[int, ...], bool], frozenset[int]] = {}

    def inputs(self, outputs: tuple[int, ...]) -> frozenset[int]:
        """Indices of the graph inputs that a gradient of any of these outputs flows to."""
        return self._from(outputs, False)

    def read(self, outputs: tuple[int, ...]) -> frozenset[int]:
        """Indices of the graph inputs that any of these outputs depends on, with a gradient or without."""
        return self._from(outputs, True)

    def _from(self, outputs: tuple[int, ...], through: bool) -> frozenset[int]:
        if (outputs, through) not in self._known:
            if self._made is None:
                self._read()
            made = self._made or {}
            stack, seen = [self._outputs[i] for i in outputs], set()
            while stack:
                name = stack.pop()
                if name not in seen:
                    seen.add(name)
                    stack += made.get(name, ()) if through or name not in self._stops else ()
            found = frozenset(i for i, name in enumerate(self._inputs) if name in seen)
            self._known[outputs, through] = found
        return self._known[outputs, through]

    def _read(self) -> None:
        import onnx

        def reads(node: onnx.NodeProto) -> set[str]:
            """Its inputs, and all that its bodies mention: names in them are unique,
            or shadow nothing that matters here.
            """
            found = set(node.input)
            for attribute in node.attribute:
                for body in ([attribute.g] if attribute.HasField("g") else attribute.graphs):
                    found.update(value.name for value in body.output)
                    for inner in body.node:
                        found |= reads(inner)
            return found - {""}

        graph = onnx.load_model_from_string(self._model).graph
        initial = {value.name for value in graph.initializer}
        self._inputs = [value.name for value in graph.input if value.name not in initial]
        self._outputs = [value.name for value in graph.output]
        self._made = {}
        for node in graph.node:
            found = reads(node)
            if node.op_type == "StopGradient":
                self._stops.update(node.output)
            for name in node.output:
                self._made[name] = found
            if node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
                self._made[node.output[0]] = set(node.input[:3])  # running statistics are written, not read

    def drop(self, differentiable: bytes, given: Sequence[Tensor | None], found: Sequence[Any]) -> Sequence[Any]:
        """What was found for the inputs, without those of inputs that no output with a gradient depends on."""
        if not any([flag and grad is None for flag, grad in zip(differentiable, given)]):
            return found
        reached = self.inputs(tuple([i for i, grad in enumerate(given) if grad is not None]))
        return [grad if i in reached else None for i, grad in enumerate(found)]


class Conditional:
    """torch.cond's rule: what only the branch not taken reads gets zeros, where the engine has nothing to give.

    Args:
        inputs: indices of graph inputs that a branch reads, directly or not.
        outputs: indices of graph outputs that come from one.
    """

    def __init__(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self._inputs, self.outputs = inputs, frozenset(outputs)

    def forward(self, ctx: Any, reach: Reach, mask: bytes, leaves: Any, tensors: Sequence[Tensor],
                outputs: Sequence[Tensor], run: Any) -> Sequence[Tensor]:
        """Marks and saves what the node's forward has to, and leaves ctx.run."""
        zeros = {i: (tensors[i].shape, tensors[i].dtype) for i in self._inputs if mask[i]}
        known = bytes(len(outputs)) if run is None else run.differentiable
        flags = bytes([flag or bool(zeros) and i in self.outputs and outputs[i].is_floating_point()
                       for i, flag in enumerate(known)])
        flat = [output for output, flag in zip(outputs, flags) if not flag]
        if flat:
            ctx.mark_non_differentiable(*flat)
        if run is not None:
            ctx.save_for_backward(*run.saved(tensors, outputs, leaves))
        ctx.run = _Run(self, reach, run, known, flags, len(tensors), zeros)
        return outputs


class _Run:
    """A run of the engine, or none where the branch taken has nothing to differentiate, and the zeros beside it."""

    def __init__(self, rule: Conditional, reach: Reach, run: Any, known: bytes, flags: bytes, count: int,
                 zeros: dict[int, Any]) -> None:
        self._rule, self._reach, self._run, self._known, self.differentiable = rule, reach, run, known, flags
        self._count, self._zeros = count, zeros

    @property
    def over(self) -> bool:
        return self._run is not None and self._run.over

    @property
    def inputs(self) -> Sequence[Tensor] | None:
        return None if self._run is None else self._run.inputs

    def changed(self) -> list[int]:
        return self._run.changed()

    def again(self) -> None:
        self._run.again()

    def forget(self) -> None:
        if self._run is not None:
            self._run.forget()

    def backward(self, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        given = [grad if flag else None for grad, flag in zip(grads, self._known)]
        found = list(self._run.backward(saved, given)) if self._run is not None else [None] * self._count
        reached = self._reach.inputs(tuple([i for i in self._rule.outputs if grads[i] is not None]))
        for i, (shape, dtype) in self._zeros.items():
            if found[i] is None and i in reached:
                found[i] = torch.zeros(shape, dtype=dtype)
        return tuple(found)
