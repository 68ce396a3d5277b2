"""Gradient clipping outside of a step, in one or two passes over memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain import _C


def all_plain(tensors: Iterable[Any]) -> bool:
    """Whether the core takes these: dense CPU tensors of a float dtype, of no class (DTensor) with memory elsewhere."""
    return all(type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and t.device.type == "cpu"
               and t.is_floating_point() for t in tensors)


def all_finite(tensors: Sequence[Tensor], sums: Sequence[float]) -> bool:
    """From their sums of squares; those of float64 may be infinite although no element is."""
    return all(math.isfinite(s) or (t.dtype == torch.float64 and bool(torch.isfinite(t).all()))
               for t, s in zip(tensors, sums))


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ on the CPU: one pass for the norm, one more only where it is too large.

    Gradients are float32, float64, bfloat16 or float16, of any shape and strides. The optimizers' ``max_grad_norm``
    does the same inside the step and saves the second pass. Gradients that the core does not take (sparse, complex, on
    another device) and other norms than the second go to torch's function.

    Args:
        parameters: a tensor or tensors whose ``.grad`` is clipped in place; None gradients are skipped.
        max_norm: gradients are multiplied by ``max_norm / (norm + 1e-6)`` where that is less than 1.
        norm_type: order of the norm.
        error_if_nonfinite: refuse a norm that is NaN or infinite, and change nothing.
        foreach: only for torch's function.

    Returns:
        The norm of all gradients together before clipping, 0-dim float32 (float64 where a gradient is).

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        ValueError: gradients share memory.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    if float(norm_type) != 2.0 or not grads or not all_plain(grads):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = math.sqrt(sum(_C.sums_of_squares(grads)))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
                           "cannot be clipped. To scale the gradients by the non-finite norm anyway, set "
                           "`error_if_nonfinite=False`")
    factor = float(max_norm) / (norm + 1e-6)
    if not factor >= 1.0:
        unique = list({id(g): g for g in grads}.values())
        if len(unique) == len(grads):
            _C.scale_tensors(grads, grads, factor, 0.0)
        else:  # one gradient of two parameters: torch multiplies it twice
            for g in grads:
                _C.scale_tensors([g], [g], factor, 0.0)
    return torch.tensor(norm, dtype=torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32)
