"""DebugOptions(verify=True): one step of a program against eager PyTorch, as a table."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

TOLERANCE = 1e-4  # of the largest entry


class VerificationError(RuntimeError):
    """The engine's result differs from eager PyTorch's by more than the tolerance."""


def _error(ours: torch.Tensor | None, eager: torch.Tensor | None) -> float:
    if ours is None or eager is None:
        return 0.0 if ours is None and eager is None else math.inf
    if not ours.numel():
        return 0.0
    ours, eager = ours.double(), eager.double()
    scale = max(eager.abs().max().item(), 1e-12)
    return ((ours - eager).abs().max() / scale).item()


def _run(call: Any, weights: list[torch.Tensor], seed_grads: list[torch.Tensor] | None) -> tuple[list[Any], list[Any], list[Any]]:
    outputs = [leaf for leaf in pytree.tree_leaves(call()) if isinstance(leaf, torch.Tensor)]
    differentiable = [output for output in outputs if output.requires_grad]
    if seed_grads is None:
        generator = torch.Generator().manual_seed(0)
        seed_grads = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in differentiable]
    grads = torch.autograd.grad(differentiable, weights, seed_grads, allow_unused=True) if differentiable and weights else ()
    return outputs, list(grads), seed_grads


def verify(module: torch.nn.Module, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> str:
    """Runs the step twice, eager and ours, dropout off in neither: a random program is refused. Returns the table.

    Buffers, gradients and the generator are as before afterwards. Raises VerificationError above TOLERANCE.
    """
    if program.session.random:
        return "verify: skipped, the program draws random numbers (set dropout to 0 to compare)"
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    weights = [p for _, p in named]
    before = copy.deepcopy(dict(module.named_buffers()))
    eager, eager_grads, seeds = _run(lambda: module(*args, **kwargs), weights, None)
    eager_buffers = copy.deepcopy(dict(module.named_buffers()))
    _restore(module, before)
    ours, our_grads, _ = _run(lambda: program(leaves, True), weights, seeds)
    rows = [(f"output {i}", _error(a, b)) for i, (a, b) in enumerate(zip(ours, eager))]
    rows += [(f"grad {name}", _error(a, b)) for (name, _), a, b in zip(named, our_grads, eager_grads)]
    rows += [(f"buffer {name}", _error(b, eager_buffers[name])) for name, b in module.named_buffers()]
    _restore(module, before)
    table = "\n".join(f"  {name:<48} {error:.2e}{'' if error <= TOLERANCE else '  <-- differs'}" for name, error in rows)
    if any(error > TOLERANCE for _, error in rows):
        raise VerificationError(f"onnxtrain differs from eager PyTorch (relative to the largest entry):\n{table}")
    return f"verify: equal to eager PyTorch (relative to the largest entry)\n{table}"


def _restore(module: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
