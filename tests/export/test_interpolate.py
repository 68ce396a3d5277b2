"""torch.nn.functional.interpolate by factors: sizes, values and gradients are eager's, with corners aligned or not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Scaled(nn.Module):
    def __init__(self, mode, factor, align):
        super().__init__()
        self.mode, self.factor, self.align = mode, factor, align

    def forward(self, x):
        return F.interpolate(x, mode=self.mode, scale_factor=self.factor, align_corners=self.align)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode, shape", [
    ("linear", (2, 3, 7)), ("bilinear", (2, 3, 10, 7)), ("bicubic", (2, 3, 10, 7)), ("trilinear", (2, 2, 5, 4, 6)),
])
def test_by_a_factor_that_is_no_whole_number(mode, shape, align, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    torch.manual_seed(0)
    eager = Scaled(mode, 1.4, align)
    model = ORTModule(copy.deepcopy(eager))
    x = torch.randn(shape)
    given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = model(given), eager(expected)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    weights = torch.randn(theirs.shape)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(given.grad, expected.grad, rtol=1e-4, atol=1e-4)
    assert onnxtrain.stats(model)["engine_steps"] == 1
