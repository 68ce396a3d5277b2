"""Adagrad, as torch.optim.Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxtrain.optim._base import FusedOptimizer, Group, Params, StateDtype, make_defaults, number


class Adagrad(FusedOptimizer):
    """Adagrad (Duchi, Hazan and Singer, JMLR 2011) in torch.optim.Adagrad's form, in one pass over memory.

    ``g += wd p``; ``s += g^2``; ``p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)``. Dtypes, clipping,
    ``state_dict`` and errors are FusedAdam's; the state is ``step`` and ``sum``, and as in torch it is there before the
    first step.

    Args:
        params: parameters, or dicts of groups.
        lr: learning rate, a number or a one-element tensor.
        lr_decay: of the learning rate with the steps.
        weight_decay: L2 penalty.
        initial_accumulator_value: of ``sum``.
        eps: added to the denominator.
        maximize: steps along the gradient.
        max_grad_norm, set_grad_none, master_weights, stochastic_rounding, state_dtype: as in FusedAdam.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    _rule = "adagrad"
    _scalings = {"sum": torch.uint8}

    def __init__(self, params: Params, lr: float | Tensor = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
                 initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False,
                 max_grad_norm: float | None = None, set_grad_none: bool = True, master_weights: bool = False,
                 stochastic_rounding: bool = False, state_dtype: StateDtype = None) -> None:
        numbers = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
                   "initial_accumulator_value": initial_accumulator_value}
        defaults = make_defaults(numbers, state_dtype=state_dtype, maximize=maximize, master_weights=master_weights,
                                 stochastic_rounding=stochastic_rounding)
        super().__init__(params, defaults, max_grad_norm, set_grad_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        with torch.no_grad():
            for param in self.param_groups[-1]["params"]:
                self._prepare(param, len(self.param_groups) - 1)
        self._fresh.clear()

    def _hyper(self, group: Group) -> tuple[float, ...]:
        return (number(group["lr"]), group["lr_decay"], group["eps"], group["weight_decay"])

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def _first_value(self, group: Group, name: str) -> float:
        return group["initial_accumulator_value"]
