"""Session.step() runs a training step in one call, and names what is wrong with its arguments."""

import pytest
import torch
from onnx import TensorProto, helper

from onnxtrain import _C


def test_errors_of_the_core():
    a, b = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "ab")
    graph = helper.make_graph([helper.make_node("Mul", ["a", "a"], ["b"])], "g", [a], [b])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    x = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="grad_mask has 2 bytes, expected 1"):
        session.step((x,), b"\1\1", 0, 0, x)
    with pytest.raises(IndexError, match="there is no output 1"):
        session.step((x,), b"\1", 0, 1, x)
    with pytest.raises(RuntimeError, match="no output of this graph has a gradient"):
        session.step((x,), b"\0", 0, 0, x)
    with pytest.raises(TypeError, match="the update is not a tuple"):
        session.step((x,), b"\1", 0, 0, x, 3)
    x.grad = None
    for i in range(1, 3):
        (y,), result = session.step((x,), b"\1", 0, 0, torch.ones(2), (max, (3, i)))
        assert y.tolist() == [1, 4] and result == 3 and x.grad.tolist() == [2 * i, 4 * i]
