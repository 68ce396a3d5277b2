"""Inputs of an export: those with a gradient of their own, those that forward leaves unused,
those of no supported kind.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_an_input_that_holds_a_gradient_is_exported_once_for_all_sizes(kind, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    eager, model = copy.deepcopy(net), ORTModule(net)
    for rows in (4, 7, 2):
        x = torch.randn(rows, 3).requires_grad_()
        x = nn.Parameter(x.detach()) if kind is nn.Parameter else x
        eager(x).sum().backward()
        expected = x.grad.clone()
        model(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * expected)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (3, 0, 1)


def test_a_call_without_any_tensor_has_nothing_to_run():
    class Product(nn.Module):
        def forward(self, a, b=2):
            return a * b

    assert ORTModule(Product())(3, b=4) == 12
