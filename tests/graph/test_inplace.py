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


PERM = RNG.permutation(9)
SCATTERS = {
    "add to rows": (helper.make_node("ScatterND", ["n", "i", "n"], ["y"], reduction="add"), PERM[:, None],
                    lambda n, y: y.__setitem__(PERM, y[PERM] + n)),
    "replace rows": (helper.make_node("ScatterND", ["n", "i", "n"], ["y"]), PERM[:, None],
                     lambda n, y: y.__setitem__(PERM, n)),
    "add to elements": (helper.make_node("ScatterElements", ["n", "i", "n"], ["y"], axis=0, reduction="add"),
                        np.repeat(PERM[:, None], 300, 1), lambda n, y: y.__setitem__(PERM, y[PERM] + n)),
    "replace elements": (helper.make_node("ScatterElements", ["n", "i", "n"], ["y"], axis=0),
                         np.repeat(PERM[:, None], 300, 1), lambda n, y: y.__setitem__(PERM, n)),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_a_scatter_of_what_it_scatters_into(name):
    """A value that is the data and the updates of one node is read at other rows than those written."""
    node, index, change = SCATTERS[name]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [9, 300]),
              helper.make_tensor_value_info("i", onnx.TensorProto.INT64, index.shape)]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["n"]), node], "g", inputs, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = RNG.standard_normal((9, 300)).astype(np.float32)
    want = -x
    change(-x, want)
    np.testing.assert_allclose(onnxtrain.backend.prepare(model).run([x, index])[0], want)
