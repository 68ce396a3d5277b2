"""One exported graph, bound to a module: gathers tensors, runs the session, writes buffers back.

The step path is here. Called by _module.py for inputs whose schema and guards fit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from onnxtrain import _C
from onnxtrain.export import Exported


class _Step(torch.autograd.Function):
    """The autograd node of one run: all gradients at once, from one call of the engine."""

    @staticmethod
    def forward(ctx: Any, program: Program, mask: bytes, *tensors: Tensor) -> Any:
        outputs, run = program.session.forward(tensors, mask, program.seed())
        ctx.set_materialize_grads(False)
        if run is None:
            ctx.mark_non_differentiable(*outputs)
            return outputs
        ctx.run = run
        ctx.save_for_backward(*[tensors[i] for i in run.saved_inputs], *[outputs[i] for i in run.saved_outputs])
        flat = [output for output, flag in zip(outputs, run.differentiable) if not flag]
        if flat:
            ctx.mark_non_differentiable(*flat)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.run.backward(ctx.saved_tensors, grads))


class Program:
    """A session and where each of its inputs and outputs lives in the user's module and call."""

    def __init__(self, module: torch.nn.Module, exported: Exported) -> None:
        start = time.perf_counter()
        self.session = _C.Session(exported.model)
        self.build_seconds = time.perf_counter() - start
        self.exported = exported
        self.guards = exported.guards
        self._random = self.session.random
        self._bind_inputs(module)
        self._bind_outputs(module)
        self._masks: dict[tuple[bool, ...], bytes] = {}

    def _bind_inputs(self, module: torch.nn.Module) -> None:
        """Weights are looked up in their owners at each step, so a replaced parameter is seen."""
        self._gather: list[tuple[dict[str, Any] | None, Any]] = []
        for source in self.exported.inputs:
            if source.kind in ("parameter", "buffer"):
                path, _, name = source.target.rpartition(".")
                owner = module.get_submodule(path)
                self._gather.append((owner._parameters if source.kind == "parameter" else owner._buffers, name))
            elif source.kind == "constant":
                self._gather.append(({"constant": source.target}, "constant"))
            else:
                self._gather.append((None, source.target))

    def _bind_outputs(self, module: torch.nn.Module) -> None:
        self._user_outputs: list[tuple[int, int]] = []  # (output, leaf)
        self._buffers: list[tuple[int, dict[str, Any], str]] = []
        for index, target in enumerate(self.exported.outputs):
            if target.kind == "user":
                self._user_outputs.append((index, target.target))
            elif target.kind == "buffer":
                path, _, name = target.target.rpartition(".")
                self._buffers.append((index, module.get_submodule(path)._buffers, name))
        self._single = (self.exported.out_spec.is_leaf() and len(self._user_outputs) == 1)

    def seed(self) -> int:
        """Key of this run's dropout; drawn from torch's generator, so torch.manual_seed rules it."""
        return int(torch.randint(0, 2**62, ()).item()) if self._random else 0

    def __call__(self, leaves: Sequence[Any], grad_enabled: bool) -> Any:
        """Runs one forward for the flattened user inputs; returns the user's output structure."""
        tensors = [owner[name] if owner is not None else leaves[name] for owner, name in self._gather]
        flags = tuple([grad_enabled and tensor.requires_grad for tensor in tensors])
        mask = self._masks.get(flags)
        if mask is None:
            mask = self._masks[flags] = bytes(flags)
        if True in flags:
            outputs = _Step.apply(self, mask, *tensors)
        else:
            outputs, _ = self.session.forward(tensors, mask, self.seed())
        if self._buffers:
            with torch.no_grad():
                for index, owner, name in self._buffers:
                    owner[name].copy_(outputs[index])
        if self._single:
            return outputs[self._user_outputs[0][0]]
        return self._structured(outputs)

    def _structured(self, outputs: Sequence[Tensor]) -> Any:
        flat: list[Any] = [None] * self.exported.out_spec.num_leaves
        for leaf, value in self.exported.out_constants.items():
            flat[leaf] = value
        for index, leaf in self._user_outputs:
            flat[leaf] = outputs[index]
        return pytree.tree_unflatten(flat, self.exported.out_spec)
