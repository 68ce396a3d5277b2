"""Activations in a byte an element, beside the formula."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from onnxtrain import _C

BLOCK = 256


def round_trip(x):
    """(q, scales, x again) of a float32 array."""
    nodes = [helper.make_node("QuantizeActivation", ["x"], ["q", "s"], domain="ai.onnxtrain"),
             helper.make_node("DequantizeActivation", ["q", "s"], ["y"], domain="ai.onnxtrain")]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
                              [onnx.ValueInfoProto(name=name) for name in "qsy"])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
    return [y.numpy() for y in _C.Session(model).forward([torch.from_numpy(x)], b"\0")[0]]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(), (1,), (255,), (256,), (3, 257), (70, 64, 33), (0, 4)])
def test_within_half_a_level(shape, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
        q, scales, y = round_trip(x)
    finally:
        torch.set_num_threads(before)
    assert q.dtype == np.int8 and q.shape == y.shape == x.shape and scales.shape == (-(-x.size // BLOCK),)
    flat, levels = x.ravel().astype(np.float64), q.ravel().astype(np.float64)
    largest = [np.abs(flat[i * BLOCK:(i + 1) * BLOCK]).max() for i in range(len(scales))]
    np.testing.assert_array_equal(scales, np.float32(largest))
    s = np.repeat(scales.astype(np.float64), BLOCK)[:x.size]
    np.testing.assert_allclose(y.ravel(), s * np.sign(levels) * (levels / 127) ** 2, rtol=1e-6)
    root = np.sqrt(np.abs(flat) / s) * 127
    assert np.all(np.abs(np.abs(levels) - root) <= 0.5 + 1e-4) and np.all(levels * flat >= 0)


def test_zeros_and_what_is_no_number():
    x = np.zeros((3, BLOCK), np.float32)
    x[1, 5], x[2, 7], x[2, 8] = np.inf, np.nan, 1
    y = round_trip(x)[2]
    assert not y[0].any() and y[1, 5] == np.inf and not np.isfinite(y[1]).any() and np.isnan(y[2]).all()


def test_other_operands_are_refused():
    graph = helper.make_graph([helper.make_node("QuantizeActivation", ["x"], ["q", "s"], domain="ai.onnxtrain")], "g",
                              [helper.make_tensor_value_info("x", onnx.TensorProto.DOUBLE, [4])],
                              [onnx.ValueInfoProto(name="q")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnxtrain", 1)], ir_version=10)
    with pytest.raises(TypeError, match="x is double, expected float"):
        _C.Session(model.SerializeToString()).forward([torch.zeros(4, dtype=torch.float64)], b"\0")
