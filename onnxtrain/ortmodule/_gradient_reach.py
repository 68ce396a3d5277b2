"""Which gradients eager PyTorch would have given at all, where backward starts from some of the outputs.

The engine computes what its program has, with zeros for unused outputs; to an optimizer a gradient of zero
and no gradient are different things. Called by the autograd node of _program.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from onnxtrain._export.segments import reads

#: Operators whose results are no floats, so that autograd does not follow them.
_ENDS = frozenset(("Shape", "Size", "NonZero", "ArgMax", "ArgMin", "Equal", "Less", "LessOrEqual", "Greater",
                   "GreaterOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf"))


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

        graph = onnx.load_model_from_string(self._model).graph
        initial = {value.name for value in graph.initializer}
        self._inputs = [value.name for value in graph.input if value.name not in initial]
        self._outputs = [value.name for value in graph.output]
        self._made = {}
        for node in graph.node:
            found = set(reads(node))
            if node.op_type == "StopGradient" or node.op_type in _ENDS:
                self._stops.update(node.output)
            for name in node.output:
                self._made[name] = found
            if node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
                self._made[node.output[0]] = set(node.input[:3])  # running statistics are written, not read

    def drop(self, differentiable: bytes, given: Sequence[Tensor | None], found: Sequence[Any]) -> Sequence[Any]:
        """`found`, with None for each input that no output with a given gradient depends on."""
        if not any([flag and grad is None for flag, grad in zip(differentiable, given)]):
            return found
        reached = self.inputs(tuple([i for i, grad in enumerate(given) if grad is not None]))
        return [grad if i in reached else None for i, grad in enumerate(found)]
