"""max and min along a dimension, among equals and with NaN: values, positions and gradients are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Picked(nn.Module):
    def __init__(self, name, dim, keepdim):
        super().__init__()
        self.name, self.dim, self.keepdim = name, dim, keepdim

    def forward(self, x):
        values, at = getattr(torch, self.name)(x, self.dim, self.keepdim)
        return values * 1.5, at


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")


def equal(module, x):
    given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    model = ORTModule(copy.deepcopy(module))
    (values, at), (eager, positions) = model(given), module(expected)
    assert torch.equal(at, positions) and torch.equal(values.isnan(), eager.isnan())
    assert torch.equal(values.nan_to_num(), eager.nan_to_num()) and values.shape == eager.shape
    values.sum().backward()
    eager.sum().backward()
    assert torch.equal(given.grad, expected.grad)
    assert onnxtrain.stats(model)["engine_steps"] == 1


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ["max", "min"])
def test_among_equals_one_has_the_gradient(name, dim, keepdim):
    torch.manual_seed(0)
    module = Picked(name, dim, keepdim)
    equal(module, torch.randint(0, 3, (4, 5, 6)).float())
    if not keepdim:
        equal(module, torch.randint(0, 3, (3, 7)).to(torch.bfloat16 if dim else torch.float16))
    x = torch.randn(5, 6)
    x[2, 1] = x[2, 4] = x[0, 3] = float("nan")
    equal(module, x)


@pytest.mark.parametrize("name", ["max", "min"])
def test_of_no_dimension_and_of_booleans(name):
    equal(Picked(name, 0, False), torch.tensor(3.0))
    flags = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    model, module = ORTModule(Picked(name, 1, False)), Picked(name, 1, False)
    ours, eager = model(flags), module(flags)
    assert torch.equal(ours[1], eager[1]) and torch.equal(ours[0], eager[0])
