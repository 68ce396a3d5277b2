"""Gradient clipping outside of a step, in one or two passes over memory,
and what FP16_Optimizer does to lists of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from onnxtrain import _C
from onnxtrain.optim import _base
from onnxtrain.optim._in_backward import refuse_clipping

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def all_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether the core takes these: dense CPU tensors of a float dtype, of no class (DTensor) with memory elsewhere."""
    return all(type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and t.device.type == "cpu"
               and t.is_floating_point() for t in tensors)


def _orders(tensor: Tensor) -> list[torch.memory_format]:
    return [torch.contiguous_format, *{4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.dim(), [])]


def there(tensors: Sequence[Tensor]) -> str:
    """The device's name where all tensors are on one of CUDA, and its kernels take them: plain floats without gaps;
    else "".

    0-dim tensors are supported; views with gaps, tensor subclasses and mixed devices are not.
    """
    place = _base.device_of(tensors[0]) if tensors and isinstance(tensors[0], Tensor) else ""
    fits = place and all(type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and t.dtype in FLOATS
                         and t.device == tensors[0].device
                         and any(t.is_contiguous(memory_format=o) for o in _orders(t)) for t in tensors)
    return place if fits else ""


class Lists:
    """Launches over lists of gradients on a device; nothing waits for them.

    Tables of the tensors stay on the device, one set per kind of call, so that a call with the tensors of the last one
    uploads nothing and may be captured.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[str, str], object] = {}

    def _call(self, place: str, what: str, sources: Sequence[Tensor], targets: Sequence[Tensor] | None = None, *,
              found_inf: Tensor | None = None, inverse: Tensor | None = None, out: Tensor | None = None,
              max_norm: float = -1.0, keep: float = 0.0) -> None:
        tables = self._tables.get((place, what))
        if tables is None:
            tables = self._tables[place, what] = _C.grad_tables()
        _C.grads_on(tables, place, what, sources, targets, found_inf, inverse, out, max_norm, keep)

    def norm(self, place: str, grads: Sequence[Tensor]) -> Tensor:
        """Of all together, 0-dim float64."""
        out = torch.zeros((), dtype=torch.float64, device=grads[0].device)
        self._call(place, "norm", grads, out=out)
        return out

    def clip(self, place: str, grads: Sequence[Tensor], max_norm: float) -> Tensor:
        """Multiplies by ``max_norm / (norm + 1e-6)`` where that is less than 1; the norm before, 0-dim float64."""
        out = torch.zeros((), dtype=torch.float64, device=grads[0].device)
        self._call(place, "clip", grads, out=out, max_norm=max_norm)
        return out

    def sums(self, place: str, grads: Sequence[Tensor]) -> Tensor:
        """Of the squares of each, float64 of shape (len(grads),)."""
        out = torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
        self._call(place, "sums", grads, out=out)
        return out

    def scale(self, place: str, sources: Sequence[Tensor], targets: Sequence[Tensor], factor: float | Tensor,
              keep: float) -> Tensor:
        """``target = source * factor + keep * target``; whether all results are finite, a 0-dim bool.

        Raises:
            ValueError: targets share memory, or a shape differs.
            TypeError: a source and its target have their elements in other orders.
        """
        found = torch.zeros((), dtype=torch.float32, device=targets[0].device)
        inverse = torch.as_tensor(factor, dtype=torch.float32, device=found.device)
        self._call(place, "scale", sources, targets, found_inf=found, inverse=inverse, keep=keep)
        return found == 0


_lists = Lists()  # of clip_grad_norm_


def all_finite(tensors: Sequence[Tensor], sums: Sequence[float]) -> bool:
    """From their sums of squares; those of float64 may be infinite although no element is."""
    return all(math.isfinite(s) or (t.dtype == torch.float64 and bool(torch.isfinite(t).all()))
               for t, s in zip(tensors, sums))


def finite_there(tensors: Sequence[Tensor], sums: Tensor) -> Tensor:
    """The same on their device, where nothing waits: a 0-dim bool."""
    narrow = [i for i, t in enumerate(tensors) if t.dtype != torch.float64]
    finite = torch.isfinite(sums if len(narrow) == len(tensors) else sums[narrow]).all()
    for t in tensors:
        if t.dtype == torch.float64:
            finite = finite & torch.isfinite(t).all()
    return finite


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None) -> Tensor:
    """torch.nn.utils.clip_grad_norm_: one pass for the norm, one more only where it is too large (on the CPU).

    Gradients are float32, float64, bfloat16 or float16, of any shape, and on the CPU of any strides. On CUDA three
    launches on torch's current stream do all of them, nothing waits, and with the tensors of the call before it may be
    captured. The optimizers' ``max_grad_norm`` does the same inside the step and saves the second pass. Gradients that
    the core does not take (sparse, complex, strided on CUDA, on several devices) and other norms than the second go to
    torch's function.

    Args:
        parameters: a tensor or tensors whose ``.grad`` is clipped in place; None gradients are skipped.
        max_norm: gradients are multiplied by ``max_norm / (norm + 1e-6)`` where that is less than 1.
        norm_type: order of the norm.
        error_if_nonfinite: refuse a norm that is NaN or infinite, and change nothing; on CUDA this waits for the norm.
        foreach: only for torch's function.

    Returns:
        The norm of all gradients together before clipping, 0-dim float32 (float64 where a gradient is).

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; or the gradients have been applied in
            backward (``step_in_backward()``).
        ValueError: gradients share memory.
        UnsupportedError: the stream is recorded, and the gradients are not those of the call before.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_clipping(params)
    grads = [p.grad for p in params if p.grad is not None]
    unique = len({id(g) for g in grads}) == len(grads)
    place = there(grads) if unique and float(norm_type) == 2.0 else ""
    if not place and (float(norm_type) != 2.0 or not grads or not all_plain(grads)):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    if place and not (error_if_nonfinite or float(max_norm) < 0):
        return _lists.clip(place, grads, float(max_norm)).to(dtype)
    total = _lists.norm(place, grads) if place else None
    norm = math.sqrt(sum(_C.sums_of_squares(grads))) if total is None else total.item()
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
                           "cannot be clipped. To scale the gradients by the non-finite norm anyway, set "
                           "`error_if_nonfinite=False`")
    factor = float(max_norm) / (norm + 1e-6)
    if not factor >= 1.0:
        if place:
            _lists.scale(place, grads, grads, factor, 0.0)
        elif unique:
            _C.scale_tensors(grads, grads, factor, 0.0)
        else:  # one gradient of two parameters: torch multiplies it twice
            for g in grads:
                _C.scale_tensors([g], [g], factor, 0.0)
    return torch.tensor(norm, dtype=dtype) if total is None else total.to(dtype)
