"""torch.nn.functional.interpolate by factors: sizes, values and gradients are eager's, with corners aligned or not.

The linear mode is decomposed by torch, with a clamp whose bound is made of sizes.
"""

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


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("how", [{"size": (5, 9)}, {"size": 4}, {"scale_factor": 2}, {"scale_factor": 0.6}])
def test_antialiasing_with_aligned_corners(mode, how):
    """ONNX's filter is as wide as the sizes' quotient, torch's as that of the distances between corners."""
    class Antialiased(nn.Module):
        def forward(self, x):
            return F.interpolate(x, mode=mode, antialias=True, align_corners=True, **how)

    model = ORTModule(Antialiased())
    x = torch.randn(2, 3, 7, 6)
    given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = model(given), Antialiased()(expected)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    weights = torch.randn(theirs.shape)
    ours.backward(weights)
    theirs.backward(weights)
    torch.testing.assert_close(given.grad, expected.grad, rtol=1e-4, atol=1e-4)
    assert onnxtrain.stats(model)["engine_steps"] == 1


@pytest.mark.parametrize("resize", [torch._C._nn.upsample_nearest2d,
                                    lambda x, *sizes: torch._C._nn.upsample_bilinear2d(x, sizes[0], False, *sizes[1:])])
@pytest.mark.parametrize("size, scale", [((9, 11), 2.0), ((9, 11), 1.3), ((14, 12), 2.0)])
def test_a_size_and_scales(resize, size, scale):
    """torch's result has the size, and its coordinates the scales."""
    class Resized(nn.Module):
        def forward(self, x):
            return resize(x, size, scale, scale)

    model, x = ORTModule(Resized()), torch.randn(2, 3, 7, 6)
    torch.testing.assert_close(model(x), Resized()(x))
    counts = onnxtrain.stats(model)
    agreeing = size == (14, 12)
    assert counts["engine_steps"] == agreeing and (agreeing or "not the quotients of sizes" in counts["reasons"][0])
