"""SGD with momentum, dampening and Nesterov's momentum, as torch.optim.SGD."""

from __future__ import annotations

import torch
from torch import Tensor

from onnxtrain.optim._base import FusedOptimizer, Group, Params, StateDtype, make_defaults, number


class SGD(FusedOptimizer):
    """Stochastic gradient descent in torch.optim.SGD's form, one pass over memory for all parameters.

    ``g += wd p``; ``b = momentum b + (1 - dampening) g``, at the first step ``b = g``; ``p -= lr b``, or with
    Nesterov's momentum (Sutskever et al., ICML 2013) ``p -= lr (g + momentum b)``. Without momentum ``p -= lr g``.
    Dtypes, clipping, ``state_dict`` and errors are FusedAdam's; the state is ``momentum_buffer``.

    Args:
        params: parameters, or dicts of groups.
        lr: learning rate, a number or a one-element tensor.
        momentum: decay of the buffer; 0 keeps none.
        dampening: share of the gradient that does not enter the buffer.
        weight_decay: L2 penalty.
        nesterov: Nesterov's momentum.
        maximize: steps along the gradient.
        max_grad_norm, set_grad_none, master_weights, stochastic_rounding, state_dtype: as in FusedAdam.

    Raises:
        ValueError: a hyperparameter is out of range, or Nesterov's momentum is asked for without momentum or with
            dampening.
    """

    _rule = "sgd"
    _scalings = {"momentum_buffer": torch.int8}

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
                 max_grad_norm: float | None = None, set_grad_none: bool = True, master_weights: bool = False,
                 stochastic_rounding: bool = False, state_dtype: StateDtype = None) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        options = {"dampening": dampening, "nesterov": bool(nesterov)}
        defaults = make_defaults(numbers, state_dtype=state_dtype, maximize=maximize, master_weights=master_weights,
                                 stochastic_rounding=stochastic_rounding)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening, "
                             f"not {momentum} and {dampening}")
        super().__init__(params, {**defaults, **options}, max_grad_norm, set_grad_none)

    def _hyper(self, group: Group) -> tuple[float, ...]:
        return (number(group["lr"]), group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"])

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _has_step(self) -> bool:
        return False
