"""register_gradient(): what it cannot do is said, and scripts that register gradients of ATen operators go on."""

from __future__ import annotations

import logging

import pytest

import onnxtrain
from onnxtrain.ortmodule._custom_gradient_registry import register_gradient


def test_aten_registrations_say_that_they_do_nothing(caplog):
    def gradient():
        return []

    with caplog.at_level(logging.WARNING, "onnxtrain"):
        assert register_gradient("org.pytorch.aten", "ATen", "embedding", "")(gradient) is gradient
    assert "'embedding'" in caplog.text and "no effect" in caplog.text


def test_a_gradient_of_an_operator_of_onnx_is_refused():
    with pytest.raises(onnxtrain.UnsupportedError, match=r"register_gradient\('', 'Cos'\).*torch.autograd.Function"):
        register_gradient("", "Cos")
