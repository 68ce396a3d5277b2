"""The cost model by which backward computes values again: shares of a step's cost against the formula."""

import onnx
import pytest
from onnx import helper

from onnxtrain import _C


def share_of(rows, region):
    """recomputed_share of a step of a product, an activation and a product, of which `region` runs again."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Gelu", ["y"], ["z"], approximate="tanh"),
             helper.make_node("MatMul", ["z", "v"], ["q"])]
    for i in region:
        entry = nodes[i].metadata_props.add()
        entry.key, entry.value = "onnxtrain.region", "r/"
    shapes = {"x": (rows, 64), "w": (64, 64), "v": (64, 64)}
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name="q")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    return _C.Session(model).plan(list(shapes.values()), b"\1" * len(shapes))["recomputed_share"]


def test_a_product_costs_its_operations_and_an_element_128():
    rows = 512
    product, activation = 2 * rows * 64 * 64, 128 * rows * 64
    # Forward: two products and the activation; backward: two products for each, and the activation's gradient.
    step = 6 * product + 2 * activation
    assert share_of(rows, []) == 0
    assert share_of(rows, [0, 1]) == pytest.approx(product / step)  # the activation's result leaves the region
