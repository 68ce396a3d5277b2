"""register_gradient(): the definition of a script stands in place of the engine's rule, and only there."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain._export import gradients
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._custom_gradient_registry import register_gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.cos(self.fc(x)) * 2, torch.cos(x)


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    monkeypatch.setattr(gradients, "REGISTERED", {})


def scaled_cos():
    """Three times the gradient, with a tensor and a number among the attributes."""
    return [
        ("Constant", [], ["factor"], {"value": {"value": -3.0, "dtype": "float", "is_tensor": True}}),
        ("Sin", ["I(0)"], ["sin"]),
        ("Mul", ["sin", "GO(0)"], ["product"]),
        ("Mul", ["product", "factor"], ["wide"]),
        ("Cast", ["wide"], ["GI(0)"], {"to": {"value": 1, "dtype": "int"}}),
    ]


def gradient(model, x):
    model.zero_grad()
    first, second = model(x)
    (first.sum() + second.sum()).backward()
    return model.module.fc.bias.grad.clone() if isinstance(model, ORTModule) else model.fc.bias.grad.clone()


def test_a_registered_gradient_is_used():
    torch.manual_seed(0)
    net = Net()
    register_gradient("", "Cos")(scaled_cos)
    model = ORTModule(net)
    for rows in (3, 5):  # and sizes may change
        x = torch.randn(rows, 4, requires_grad=True)
        with torch.no_grad():
            expected = net(x)
        torch.testing.assert_close(model(x), expected)
        ours, inputs = gradient(model, x), x.grad.clone()
        torch.testing.assert_close(ours, 3 * gradient(net, x))
        torch.testing.assert_close(inputs, 3 * (x.grad - inputs))
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] == 0 and counts["engine_steps"] == 4


def test_aten_registrations_say_that_they_do_nothing(caplog):
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        register_gradient("org.pytorch.aten", "ATen", "embedding", "")(scaled_cos)
    assert "'embedding'" in caplog.text and "no effect" in caplog.text and not gradients.REGISTERED
