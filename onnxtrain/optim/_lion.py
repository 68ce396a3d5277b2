"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from onnxtrain.optim._base import FusedOptimizer, Group, Params, StateDtype, make_defaults, number


class Lion(FusedOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2), in one pass.

    ``p -= lr wd p``; ``p -= lr sign(beta1 m + (1 - beta1) g)``; ``m = beta2 m + (1 - beta2) g``. Dtypes, clipping and
    errors are FusedAdam's; the state is ``exp_avg``.

    Args:
        params: parameters, or dicts of groups.
        lr: learning rate; three to ten times smaller than Adam's.
        betas: of the interpolation, and of the momentum.
        weight_decay: decoupled.
        maximize: steps along the gradient.
        max_grad_norm, set_grad_none, master_weights, stochastic_rounding, state_dtype: as in FusedAdam.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    _rule = "lion"
    _scalings = {"exp_avg": torch.int8}

    def __init__(self, params: Params, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0, *, maximize: bool = False, max_grad_norm: float | None = None,
                 set_grad_none: bool = True, master_weights: bool = False, stochastic_rounding: bool = False,
                 state_dtype: StateDtype = None) -> None:
        defaults = make_defaults({"lr": lr, "betas": betas, "weight_decay": weight_decay}, state_dtype=state_dtype,
                                 maximize=maximize, master_weights=master_weights,
                                 stochastic_rounding=stochastic_rounding)
        super().__init__(params, defaults, max_grad_norm, set_grad_none)

    def _hyper(self, group: Group) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return (number(group["lr"]), number(beta1), number(beta2), group["weight_decay"])

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def _has_step(self) -> bool:
        return False
