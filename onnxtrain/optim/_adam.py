"""FusedAdam: Adam and AdamW, in the three orders of weight decay that scripts depend on."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from onnxtrain.optim._base import FusedOptimizer, Group, Params, StateDtype, make_defaults, number

TORCH_L2 = 3  # torch.optim.Adam's own order, which a state dict of it brings along


class AdamWMode(enum.IntEnum):
    """Where weight decay enters.

    - ``ADAM_L2_REGULARIZATION``: ``g += wd p`` first; denominator ``sqrt(v) + eps``, step ``lr sqrt(c2) / c1``.
    - ``ADAMW_TRANSFORMERS``: the same step on the raw gradient, then ``p -= lr wd p`` (transformers' AdamW).
    - ``ADAMW_TORCH``: ``p -= lr wd p`` first; denominator ``sqrt(v) / sqrt(c2) + eps``, step ``lr / c1``
      (``torch.optim.AdamW``).

    ``c1 = 1 - beta1^t``, ``c2 = 1 - beta2^t``; both 1 without bias correction.
    """

    ADAM_L2_REGULARIZATION = 0
    ADAMW_TRANSFORMERS = 1
    ADAMW_TORCH = 2


class FusedAdam(FusedOptimizer):
    """Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019) for dense CPU parameters.

    One call of the core updates all parameters of all groups, on all cores, in one pass over memory. Parameters are
    float32, float64, bfloat16 or float16, strided or not, gradients any of these, mixed in one group; arithmetic is
    float32 (float64 for float64 parameters), rounded once at the end. ``state_dict()`` is interchangeable with
    ``torch.optim.AdamW``'s both ways. Gradients are read only: neither clipping nor unscaling writes them back.

    Args:
        params: parameters, or dicts of groups.
        lr: learning rate, a number or a one-element tensor.
        bias_correction: divide the moments by ``1 - beta^t``.
        betas: decay of the first and second moment.
        eps: added to the denominator. The default is that of onnxruntime-training, torch's is 1e-8.
        adam_w_mode: see AdamWMode.
        weight_decay: see AdamWMode.
        set_grad_none: what ``zero_grad()`` does when it is not told.
        max_grad_norm: clips all gradients together to this norm inside the step, as
            ``torch.nn.utils.clip_grad_norm_`` before it would; ``step()`` returns the norm.
        amsgrad: the largest second moment so far is used (Reddi, Kale and Kumar, 2018).
        maximize: steps along the gradient.
        master_weights: float32 copies of 16-bit parameters; moments are float32 then.
        stochastic_rounding: of 16-bit parameters without master weights.
        state_dtype: dtype of the moments: float32, float64, bfloat16 or "int8"; None is the parameter's, as in torch,
            but float32 for float16, in which small squares would vanish. "int8" keeps 8 bits an element with a
            float32 scale for each 256: the first moment to within ``sqrt(|m| / s) / 127`` of its block's largest
            magnitude s (half a level of a square law), the second to within 0.8% at the block's largest and 8% at a
            ten thousandth of it (a fourth-power law, 10^-9.6 of the range; a nonzero moment never becomes zero, so
            that no step explodes). float64 parameters keep float64.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    _rule = "adam"
    _scalings = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
                 adam_w_mode: AdamWMode = AdamWMode.ADAMW_TRANSFORMERS, weight_decay: float = 0.0,
                 set_grad_none: bool = True, *, max_grad_norm: float | None = None, amsgrad: bool = False,
                 maximize: bool = False, master_weights: bool = False, stochastic_rounding: bool = False,
                 state_dtype: StateDtype = None) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options = {"bias_correction": bool(bias_correction), "adam_w_mode": int(AdamWMode(adam_w_mode)),
                   "amsgrad": bool(amsgrad)}
        defaults = make_defaults(numbers, state_dtype=state_dtype, maximize=maximize, master_weights=master_weights,
                                 stochastic_rounding=stochastic_rounding)
        super().__init__(params, {**defaults, **options}, max_grad_norm, set_grad_none)

    def _hyper(self, group: Group) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return (number(group["lr"]), number(beta1), number(beta2), group["eps"], group["weight_decay"],
                group["adam_w_mode"], group["bias_correction"], group["amsgrad"])

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _adopt(self, group: dict[str, Any]) -> None:
        super()._adopt(group)
        if "adam_w_mode" not in group and "decoupled_weight_decay" in group:  # torch.optim's Adam or AdamW
            group["adam_w_mode"] = int(AdamWMode.ADAMW_TORCH) if group["decoupled_weight_decay"] else TORCH_L2
            group["bias_correction"] = True
