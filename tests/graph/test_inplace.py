"""Results that take an operand's place in memory: only one of the same size, element by element."""

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxtrain.backend

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("small, large", [((4,), (4, 4)), ((2, 1), (2, 4)), ((1,), (2, 2)), ((4, 1), (4, 4))])
def test_comparison_has_the_bytes_of_a_broadcast_operand(small, large):
    """(4,) float32 and (4, 4) bool are 16 bytes both: a result written over the operand would be read back as a
    number.
    """
    nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("Greater", ["n", "y"], ["g"]),
             helper.make_node("Not", ["g"], ["z"])]
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in (("x", small), ("y", large))]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("z", onnx.TensorProto.BOOL, large)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    prepared = onnxtrain.backend.prepare(model)
    for _ in range(8):
        x, y = (RNG.standard_normal(s).astype(np.float32) for s in (small, large))
        np.testing.assert_array_equal(prepared.run([x, y])[0], ~(-x > y))
