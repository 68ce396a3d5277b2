"""Inference removes, once gradients are there, a Where with a constant condition and barriers of gradients."""


import numpy as np
import pytest
import torch
from harness import OURS
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import _C


def session_of(nodes, inputs, constants=()):
    """Of float inputs of 3 x 4; the output is z."""
    described = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 4]) for name in (*inputs, "z")}
    graph = helper.make_graph(nodes, "graph", [described[name] for name in inputs], [described["z"]],
                              [numpy_helper.from_array(value, name) for name, value in constants])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(OURS, 1)])
    return _C.Session(model.SerializeToString())


@pytest.mark.parametrize("holds", [True, False])
def test_a_where_with_a_constant_condition(holds):
    """The branch that is not taken has a gradient of zeros."""
    session = session_of([helper.make_node("Where", ["c", "x", "y"], ["w"]), helper.make_node("Exp", ["w"], ["z"])],
                         ["x", "y"], [("c", np.array(holds))])
    assert "Where" in session.text("loaded")
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    (z,), run = session.forward([x, y], b"\1\1")
    forward = session.text("program").split("# backward")[0]
    assert "Where" not in forward, forward
    torch.testing.assert_close(z, torch.exp(x if holds else y))
    grads = run.backward([[x, y][i] for i in run.saved_inputs] + [z for _ in run.saved_outputs], [torch.ones(3, 4)])
    taken, other = grads if holds else reversed(grads)
    torch.testing.assert_close(taken, z)
    assert torch.equal(other, torch.zeros(3, 4))


def test_a_barrier_splits_no_group():
    session = session_of([helper.make_node("Exp", ["x"], ["e"]),
                          helper.make_node("StopGradient", ["e"], ["s"], domain=OURS),
                          helper.make_node("Mul", ["s", "x"], ["z"])], ["x"])
    x = torch.randn(3, 4)
    (z,), run = session.forward([x], b"\1")
    assert "StopGradient" not in session.text("program")
    torch.testing.assert_close(z, x.exp() * x)
    (grad,) = run.backward([x for _ in run.saved_inputs] + [z for _ in run.saved_outputs], [torch.ones(3, 4)])
    torch.testing.assert_close(grad, x.exp())
