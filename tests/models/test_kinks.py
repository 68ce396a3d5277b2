"""Slopes where eager has to choose one: at the corners of piecewise functions, at ties, at bounds, at zero.
One export for all.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule

POINTS = [-6.0, -3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0]

FUNCTIONS = {
    "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "hardtanh wide": lambda x: F.hardtanh(x, -3.0, 6.0),
    "hardswish": F.hardswish, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "elu": F.elu, "celu": F.celu,
    "celu 2": lambda x: F.celu(x, 2.0), "selu": F.selu,
    "prelu": lambda x: F.prelu(x, x.new_full((1,), 0.25)), "softshrink": F.softshrink, "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.5, 0.1), "softplus": F.softplus, "softsign": F.softsign,
    "tanhshrink": F.tanhshrink, "logsigmoid": F.logsigmoid, "mish": F.mish, "silu": F.silu, "gelu": F.gelu,
    "clamp": lambda x: x.clamp(-1, 2), "clamp min": lambda x: x.clamp(min=0), "clamp max": lambda x: x.clamp(max=1),
    "clamp_min": lambda x: x.clamp_min(0.5), "clamp_max": lambda x: x.clamp_max(-2),
    "clamp by tensors": lambda x: x.clamp(x.new_tensor(-1), x.new_tensor(3)),
    "maximum": lambda x: torch.maximum(x, torch.ones_like(x)),
    "minimum": lambda x: torch.minimum(x, torch.full_like(x, 2)),
    "abs": torch.abs, "sign times": lambda x: x * torch.sign(x), "where": lambda x: torch.where(x > 0, x, 2 * x),
    "hinge": lambda x: F.relu(1 - x), "amax of ties": lambda x: torch.stack([x, x, x - 1]).amax(0),
    "max of ties": lambda x: torch.stack([x, x]).max(0).values,
    "max_pool of ties": lambda x: F.max_pool1d(x[None, None] * 0, 3, 1, 1)[0, 0] + x,
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "l1": lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=2.0),
    "norm of zeros": lambda x: (x * 0).norm() + x,
    "normalize zeros": lambda x: F.normalize((x * 0).view(2, 6), dim=1).reshape(-1) + x,
    "atan2": lambda x: torch.atan2(x, x + 1), "atan2 of steps": lambda x: torch.atan2(x + 0.25, x.roll(3)),
    "sinc": torch.sinc, "logsumexp": lambda x: x.logsumexp(0) + x, "lerp": lambda x: torch.lerp(x, 2 * x, 0.3),
    "logaddexp": lambda x: torch.logaddexp(x, 2 * x),
}


class Kinks(nn.Module):
    """Row i of the weight goes through function i."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor([POINTS] * len(FUNCTIONS), dtype=dtype))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([f(row * scale) for f, row in zip(FUNCTIONS.values(), self.rows.unbind())])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 1e-5)],
                         ids=["float64", "float32"])
def test_slopes_are_those_of_eager(dtype, tolerance):
    eager = Kinks(dtype)
    ours = ORTModule(copy.deepcopy(eager))
    scale = torch.ones((), dtype=dtype)
    weight = torch.linspace(1, 2, len(POINTS), dtype=dtype)
    results = []
    for model in (eager, ours):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = model(scale)
        (y * weight).sum().backward()
        results.append((y.detach(), model.rows.grad if model is eager else next(model.parameters()).grad))
    counts = onnxtrain.stats(ours)
    assert counts["engine_steps"] == 1 and counts["fallback_steps"] == 0, counts["reasons"]
    wrong = []
    for i, name in enumerate(FUNCTIONS):
        for what, want, got in (("value", results[0][0][i], results[1][0][i]),
                                ("slope", results[0][1][i], results[1][1][i])):
            for k, point in enumerate(POINTS):
                a, b = want[k].item(), got[k].item()
                same = (math.isnan(a) and math.isnan(b)) or a == b or abs(a - b) <= tolerance * max(1.0, abs(a))
                if not same:
                    wrong.append(f"{name} at {point}: {what} {b}, eager has {a}")
    assert not wrong, "\n".join(wrong)
