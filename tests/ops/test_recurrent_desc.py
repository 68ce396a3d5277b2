"""RNN, GRU and LSTM whose attributes or shapes do not fit: one message that names the argument."""

import numpy as np
import pytest
from harness import Case, R, V, expect_error

from onnxtrain import UnsupportedError


def shaped(op, *inputs, **attrs):
    return Case(op, list(inputs), attrs, opset=22)


ERRORS = [
    (shaped("LSTM", R(3, 2, 3), R(1, 8, 3), R(1, 8, 2), R(1, 15)), ValueError, "B is"),
    (shaped("LSTM", R(3, 2, 3), R(1, 8, 4), R(1, 8, 2)), ValueError, "W is"),
    (shaped("GRU", R(3, 2, 3), R(1, 6, 3), R(1, 6, 2), hidden_size=3), ValueError, "hidden_size"),
    (shaped("GRU", R(3, 2, 3), R(1, 6, 3), R(1, 6, 2), direction="sideways"), ValueError, "sideways"),
    (shaped("RNN", R(3, 2, 3), R(1, 2, 3), R(1, 2, 2), activations=["Sine"]), UnsupportedError, "Sine"),
    (shaped("RNN", R(3, 2, 3), R(1, 2, 3), R(1, 2, 2), activations=["Tanh", "Tanh"]), ValueError, "activations has 2 entries"),
    (shaped("RNN", R(3, 2, 3), R(1, 2, 3), R(1, 2, 2), None, V([1], np.int32)), ValueError, "sequence_lens"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
