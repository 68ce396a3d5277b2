"""Nodes of a registered definition give the gradients of an operator, and wrong ones are named."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from test_custom_gradient_registry import Net, gradient, strict  # noqa: F401

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._custom_gradient_registry import register_gradient


def test_inputs_without_a_definition_have_no_gradient_and_constants_are_inputs():
    class Power(nn.Module):
        def forward(self, x):
            return x ** 3.0

    @register_gradient("ai.onnx", "Pow")
    def _():
        return [("Mul", ["GO(0)", "I(1)"], ["times"]), ("Mul", ["times", "O(0)"], ["GI(0)"])]

    x = torch.randn(3, requires_grad=True)
    ORTModule(Power())(x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 3)


def test_a_wrong_shape_is_an_error_and_an_unknown_operator_is_named():
    register_gradient("", "Cos")(lambda: [("ReduceSum", ["GO(0)"], ["GI(0)"])])
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"Cos gives GI\(0\) the shape"):
        gradient(ORTModule(Net()), x)
    register_gradient("", "Cos")(lambda: [("Nonesuch", ["GO(0)"], ["GI(0)"])])
    with pytest.raises(onnxtrain.UnsupportedError, match="Nonesuch"):
        gradient(ORTModule(Net()), x)
    register_gradient("", "Cos")(lambda: [("Sin", ["I(0)"])])
    with pytest.raises(ValueError, match="a step of a registered gradient"):
        gradient(ORTModule(Net()), x)
