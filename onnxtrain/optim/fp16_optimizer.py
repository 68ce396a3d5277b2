"""FP16_Optimizer: faster overflow check, norm, clipping and unscaling for other libraries' mixed-precision optimizers.

What is replaced is replaced on the object, and only where its library's code is known. Arithmetic that a library may
change (which gradients count, how norms of processes are joined, what the clipping factor is) stays the library's own:
it is called with one number per gradient in place of the gradient.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain import _C
from onnxtrain._torch import METHODS, digest
from onnxtrain.optim._base import FusedOptimizer
from onnxtrain.optim._clip import Lists, all_finite, all_plain, finite_there, there

# Methods that are replaced whole, where their source is known: that of DeepSpeed 0.18.9 to 0.19.8
ZERO_WHOLE = ("has_overflow_serial", "has_overflow_partitioned_grads_serial")
ZERO_NEEDED = {"get_grad_norm_direct": ("gradients", "params", "norm_type"),
               "unscale_and_clip_grads": ("grad_groups_flat", "total_norm")}


def FP16_Optimizer(optimizer: Any, **kwargs: object) -> Any:
    """Makes an optimizer of DeepSpeed or Apex check, measure and unscale gradients in one pass.

    Known are DeepSpeed's ZeRO stage 1 and 2 (``DeepSpeedZeroOptimizer``, also inside accelerate's wrapper) and Apex
    AMP's O2 (an optimizer with ``_amp_stash``). Gradients are found, measured and unscaled as the library does it, with
    sums in double; dense gradients on the CPU or on one CUDA device (a few launches, nothing that waits but where the
    library waits itself), others take the library's own way at each call. Where ZeRO's inner optimizer is one of
    onnxtrain.optim, unscaling and clipping happen inside its step.

    Args:
        optimizer: what ``deepspeed.initialize`` or ``amp.initialize`` made.
        kwargs: those that Megatron's scripts give, without effect.

    Returns:
        The same object; with a UserWarning and no change where its type, as that of Megatron's, or the version of its
        library is not known.
    """
    wrapped = _named(optimizer, "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper")
    target = optimizer.optimizer if wrapped else optimizer
    if getattr(target, "_onnxtrain_patched", False):
        return optimizer
    if _named(target, "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
              "deepspeed.runtime.zero.stage2.FP16_DeepSpeedZeroOptimizer"):
        problem = _patch_zero(target)
    elif hasattr(target, "_amp_stash"):
        problem = _patch_apex(target)
    else:
        problem = "onnxtrain does not know this type"
    if problem:
        name = f"{type(target).__module__}.{type(target).__qualname__}"
        warnings.warn(f"FP16_Optimizer leaves {name} unchanged: {problem}", UserWarning, stacklevel=2)
    else:
        target._onnxtrain_patched = True
    return optimizer


def _named(value: object, *names: str) -> bool:
    """Whether the value's class itself, not only a base of it, is one of these: a subclass may do otherwise."""
    return f"{type(value).__module__}.{type(value).__qualname__}" in names


# ---- DeepSpeed ZeRO 1 and 2 ----

def _float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class _Lists(Lists):
    """The same for gradients on the CPU, whose place is "cpu"."""

    def place(self, tensors: list[Tensor]) -> str:
        """ "" where neither takes them."""
        return there(tensors) or ("cpu" if all_plain(tensors) else "")

    def sums(self, place: str, grads: Sequence[Tensor]) -> Tensor:
        return _float64(_C.sums_of_squares(grads)) if place == "cpu" or not grads else super().sums(place, grads)

    def finite(self, place: str, grads: list[Tensor], sums: Tensor) -> Tensor:
        """Whether all elements are, as a 0-dim bool there."""
        return torch.tensor(all_finite(grads, sums.tolist())) if place == "cpu" else finite_there(grads, sums)

    def scale(self, place: str, sources: Sequence[Tensor], targets: Sequence[Tensor], factor: float | Tensor,
              keep: float) -> Tensor:
        if place == "cpu" or not sources:
            return torch.tensor(_C.scale_tensors(sources, targets, float(factor), keep))
        return super().scale(place, sources, targets, factor, keep)


class _Sums:
    """Sums of squares from the overflow check, for the norm that follows over the same gradients."""

    def __init__(self, lists: _Lists) -> None:
        self.lists = lists
        self.known: dict[int, tuple[Tensor, int, int]] = {}
        self.sums = torch.zeros(0, dtype=torch.float64)

    def measure(self, place: str, grads: list[Tensor]) -> Tensor:
        self.sums = self.lists.sums(place, grads)
        self.known = {id(g): (g, g._version, i) for i, g in enumerate(grads)}
        return self.sums

    def take(self, place: str, grads: list[Tensor]) -> Tensor:
        """Of these gradients; what is known serves once."""
        known, self.known = self.known, {}
        hits = [known.get(id(g)) for g in grads]
        if all(hit is not None and hit[0] is g and hit[1] == g._version for hit, g in zip(hits, grads)):
            at = [hit[2] for hit in hits if hit is not None]
            return self.sums if at == list(range(len(self.sums))) else self.sums[at]
        return self.lists.sums(place, grads)


def _patch_zero(optimizer: Any) -> str | None:
    """Returns why it was not done."""
    cls = type(optimizer)
    for name in ZERO_WHOLE:
        found = digest(getattr(cls, name)) if hasattr(cls, name) else "missing"
        if found not in METHODS[name].known:
            return f"onnxtrain does not know {name}() of this version of DeepSpeed ({found})"
    for name, expected in ZERO_NEEDED.items():
        if tuple(inspect.signature(getattr(optimizer, name)).parameters)[: len(expected)] != expected:
            return f"{name}() of this version of DeepSpeed does not take the arguments {', '.join(expected)}"
    lists = _Lists()
    sums = _Sums(lists)
    check_params, check_partition = optimizer.has_overflow_serial, optimizer.has_overflow_partitioned_grads_serial
    norm_of, unscale = optimizer.get_grad_norm_direct, optimizer.unscale_and_clip_grads

    def has_overflow_serial(self: Any, params: Iterable[Tensor]) -> Tensor:
        params = list(params)
        grads = [p.grad for p in params if p.grad is not None]
        place = lists.place(grads)
        if not place:
            return check_params(params)
        return ~lists.finite(place, grads, lists.sums(place, grads)).reshape(1)

    def has_overflow_partitioned_grads_serial(self: Any) -> Tensor:
        grads = [g for i in range(len(self.bit16_groups)) for g in self.averaged_gradients[i] if g is not None]
        place = lists.place(grads)
        if not place:
            return check_partition()
        return ~lists.finite(place, grads, sums.measure(place, grads)).reshape(1)

    def get_grad_norm_direct(self: Any, gradients: Iterable[Tensor], params: Iterable[Tensor],
                             norm_type: float = 2) -> Tensor:
        grads = list(gradients)
        place = lists.place(grads)
        if float(norm_type) != 2.0 or not place:
            return norm_of(grads, params, norm_type)
        stand_ins = []
        for g, stand_in in zip(grads, sums.take(place, grads).sqrt().split(1)):
            stand_in.__dict__.update(g.__dict__)  # DeepSpeed marks padding so
            stand_ins.append(stand_in)
        return norm_of(stand_ins, params, norm_type)

    def unscale_and_clip_grads(self: Any, grad_groups_flat: list[Tensor | list[Tensor]], total_norm: object) -> None:
        inner = self.optimizer
        flat = [g for item in grad_groups_flat for g in (item if isinstance(item, list) else [item])]
        owned = [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]
        in_step = (isinstance(inner, FusedOptimizer) and not self.cpu_offload and not getattr(self, "zenflow", False)
                   and not getattr(self, "torch_autocast_gradscaler", None) and len(owned) == len(flat)
                   and all(a is b for a, b in zip(owned, flat)) and len({g.dtype for g in flat}) == 1)
        if not in_step:
            return unscale(grad_groups_flat, total_norm)
        probe = torch.ones(1, dtype=flat[0].dtype, device=flat[0].device)
        unscale([probe], total_norm)
        inner.next_unscale = probe.float() if probe.is_cuda else probe.item()
        return None

    for function in (has_overflow_serial, has_overflow_partitioned_grads_serial, get_grad_norm_direct,
                     unscale_and_clip_grads):
        setattr(optimizer, function.__name__, types.MethodType(function, optimizer))
    return None


# ---- Apex AMP ----

def _patch_apex(optimizer: Any) -> str | None:
    """O2 only: float32 master copies of float16 parameters, listed in ``_amp_stash``."""
    lists = _Lists()
    post_backward: Any = getattr(optimizer, "_post_amp_backward", None)
    function = getattr(post_backward, "__func__", post_backward)
    name = getattr(function, "__name__", "")
    if name != "post_backward_with_master_weights" or not hasattr(optimizer, "_amp_lazy_init"):
        return "it has _amp_stash, but not the master weights of Apex AMP's O2"

    def _post_amp_backward(self: Any, scaler: Any) -> None:
        """Master gradients from the float16 ones: copied and unscaled, or added to those of earlier backwards."""
        self._amp_lazy_init()
        stash = self._amp_stash
        halves = [(p, m) for p, m in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params) if p.grad is not None]
        own, held = stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash
        tensors = [t for p, m in halves for t in (p.grad, m)] + [p.grad for p in own if p.grad is not None]
        place = lists.place(tensors)
        if scaler._has_overflow or not place:
            return post_backward(scaler)
        written: tuple[list[Tensor], list[Tensor]] = ([], [])  # sources and targets
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for p, master in halves:
            first = master.grad is None
            if first:
                master.grad = torch.empty_like(master)
            sources, targets = written if first else added
            sources.append(p.grad)
            targets.append(master.grad)
        for i, (p, earlier) in enumerate(zip(own, held)):
            if p.grad is not None:
                sources, targets = written if earlier is None else added
                sources.append(p.grad)
                targets.append(p.grad if earlier is None else earlier)
            if earlier is not None:
                p.grad = earlier
            held[i] = None
        factor = 1.0 / scaler.loss_scale()
        finite = [lists.scale(place, *pair, factor, keep) for pair, keep in ((written, 0.0), (added, 1.0)) if pair[0]]
        if scaler.dynamic and not all(finite):
            scaler._has_overflow = True  # update_scale() looks at it first
        return None

    optimizer._post_amp_backward = types.MethodType(_post_amp_backward, optimizer)
    return None
