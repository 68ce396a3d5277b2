"""A model cannot name the node of a group of elementwise nodes."""

import onnx
import pytest
from onnx import helper

from onnxtrain import _C


def test_a_model_cannot_bring_steps_of_its_own():
    """The attributes are trusted once a pass has written them: a model cannot name the operator."""
    node = helper.make_node("FusedElementwise", ["x"], ["y"], domain="ai.onnxtrain", steps=[1, 50, 1, 1, 0, 9, 0, 0],
                            parameters=[0.0, 0.0], results=[0])
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (4,))],
                              [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph,
                              opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)],
                              ir_version=10)
    with pytest.raises(ValueError, match="is an internal operator, which a model cannot use"):
        _C.Session(model.SerializeToString())
