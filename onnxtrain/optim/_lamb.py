"""LAMB: Adam's step, scaled for each tensor by the ratio of the parameter's norm to the step's."""

from __future__ import annotations

import torch
from torch import Tensor

from onnxtrain.optim._base import FusedOptimizer, Group, Params, StateDtype, make_defaults, number


class Lamb(FusedOptimizer):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2; phi is the identity).

    ``m = beta1 m + (1 - beta1) g``; ``v = beta2 v + (1 - beta2) g^2``; ``u = m / c1 / (sqrt(v / c2) + eps) + wd p``;
    ``p -= lr |p| / |u| u`` with the norms of each tensor by itself; where one is zero the ratio is 1.
    ``c1 = 1 - beta1^t``, ``c2 = 1 - beta2^t``; both 1 without bias correction. Two passes over memory: the ratio is
    known after the first. The second takes the moments as they are stored, so that bfloat16 and 8-bit moments enter the
    step with their rounding.
    Dtypes, clipping and errors are FusedAdam's; the state is ``step``, ``exp_avg`` and ``exp_avg_sq``.

    Args:
        params: parameters, or dicts of groups.
        lr: learning rate, a number or a one-element tensor.
        bias_correction: divide the moments by ``1 - beta^t``.
        betas: decay of the first and second moment.
        eps: added to the denominator.
        weight_decay: enters u, and so the ratio.
        ratio_min, ratio_max: limits of the ratio, where neither norm is zero.
        maximize: steps along the gradient.
        max_grad_norm, set_grad_none, master_weights, stochastic_rounding, state_dtype: as in FusedAdam.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    _rule = "lamb"
    _scalings = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.0,
                 ratio_min: float = 0.0, ratio_max: float = float("inf"), *, maximize: bool = False,
                 max_grad_norm: float | None = None, set_grad_none: bool = True, master_weights: bool = False,
                 stochastic_rounding: bool = False, state_dtype: StateDtype = None) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "ratio_min": ratio_min}
        options = {"bias_correction": bool(bias_correction), "ratio_max": ratio_max}
        defaults = make_defaults(numbers, state_dtype=state_dtype, maximize=maximize, master_weights=master_weights,
                                 stochastic_rounding=stochastic_rounding)
        if not ratio_max >= ratio_min:
            raise ValueError(f"Invalid ratio_max: {ratio_max} (expected at least ratio_min, {ratio_min})")
        super().__init__(params, {**defaults, **options}, max_grad_norm, set_grad_none)

    def _hyper(self, group: Group) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return (number(group["lr"]), number(beta1), number(beta2), group["eps"], group["weight_decay"],
                group["bias_correction"], group["ratio_min"], group["ratio_max"])

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")
