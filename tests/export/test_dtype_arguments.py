"""Reductions with a dtype argument: what goes in is cast, as torch has it, and not what comes out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Reduced(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


WIDER = {
    "softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "log_softmax": lambda x: torch.log_softmax(x, 0, dtype=torch.float32),
    "mean": lambda x: x.mean(1, dtype=torch.float32),
    "mean of two": lambda x: x.mean((0, 1), keepdim=True, dtype=torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32),
    "sum along": lambda x: x.sum(-1, keepdim=True, dtype=torch.float32),
    "sum along none": lambda x: x.sum((), keepdim=True, dtype=torch.float32),
}
PLAIN = {
    "softmax": lambda x: torch.softmax(x, 0) + torch.log_softmax(x, -1),
    "softmax of a number": lambda x: (torch.softmax(x.sum(), 0) * x
                                      + torch.log_softmax(x.mean(), -1, dtype=torch.float32)),
    "mean": lambda x: x.mean() + x.mean(0) + x.mean((), keepdim=True) + x[0, 0].mean(dim=0),
    "sum": lambda x: x.sum() * x.sum((0, 1)) + x.sum(0, keepdim=True) + x[0, 0].sum(),
    "sum of integers": lambda x: (x > 0).sum(1) * (x > 1).int().sum() + x.sum(0, keepdim=True).sum(),
    "narrower": lambda x: torch.softmax(x, -1, dtype=torch.bfloat16).float() + x.sum(dtype=torch.float64),
}


def compared(function, x, **tolerance):
    """Results and gradients of ORTModule and of eager, which are to be equal, and the model."""
    eager = Reduced(function)
    model, given, expected = ORTModule(copy.deepcopy(eager)), x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = model(given), eager(expected)
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, **tolerance)
    weights = torch.linspace(0.5, 1.5, ours.numel(), dtype=torch.float32).reshape(ours.shape).to(ours.dtype)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(given.grad, expected.grad)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (1, 0)


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    torch.manual_seed(0)


@pytest.mark.parametrize("name", WIDER)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_reduced_in_float32(name, dtype):
    compared(WIDER[name], 200 * torch.rand(5, 700).to(dtype), rtol=1e-5, atol=1e-5)  # a sum is beyond float16's 65,504


@pytest.mark.parametrize("name", PLAIN)
def test_without_a_dtype_and_of_other_ranks(name):
    compared(PLAIN[name], torch.randn(4, 6))
