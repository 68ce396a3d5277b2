"""The core updates in backward what is a target, and refuses targets that do not fit."""

from __future__ import annotations

import onnx
import pytest
import torch
import torch.nn as nn
from onnx import helper

from onnxtrain import _C
from onnxtrain.optim import SGD


@pytest.fixture
def opened():
    """A run of y = (x w + b) u, the parameters w, b, u of an Updater, and what its backward() takes besides."""
    shape = [3, 3]
    node, value = helper.make_node, lambda name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
    nodes = [node("MatMul", ["x", "w"], ["p"]), node("Add", ["p", "b"], ["s"]), node("MatMul", ["s", "u"], ["y"])]
    graph = helper.make_graph(nodes, "g", [value(name) for name in "xwbu"], [value("y")])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    x, *params = [torch.randn(3, 3) for _ in range(4)]
    optimizer = SGD([nn.Parameter(p) for p in params], lr=0.5)
    params = optimizer.param_groups[0]["params"]
    tensors = [x, *[p.detach() for p in params]]

    def run(mask=b"\0\2\2\1"):
        (y,), opened = session.forward(tensors, mask)
        return opened, [tensors[i] for i in opened.saved_inputs], [torch.ones(3, 3)]

    def backward(run, targets, done=None):
        done = bytearray(len(targets)) if done is None else done
        found = _C.Updater("sgd", "SGD").backward(*run, optimizer.param_groups, optimizer._hypers(), optimizer.state,
                                                  optimizer._prepare, 0, targets, done)
        return found, done

    return run, backward, tensors, params


def test_core_applies_targets_alone(opened):
    run, backward, (x, w, b, u), params = opened
    before = w.clone(), b.clone(), u.clone()
    assert set(run()[0].applied) == {1, 2} and run(b"\0\1\1\1")[0].applied == ()
    found, done = backward(run(), [(1, 0, params[0])])
    grad = torch.ones(3, 3) @ before[2].T
    torch.testing.assert_close(w, before[0] - 0.5 * x.T @ grad)
    assert torch.equal(b, before[1]) and torch.equal(u, before[2]) and done == b"\1"
    assert [f is None for f in found] == [True, True, True, False]


def test_core_refuses_targets(opened):
    run, backward, tensors, params = opened
    before = [t.clone() for t in tensors]
    for targets, error, match in (
            ([(3, 2, params[2])], ValueError, "input 3 has no gradient"), ([(9, 0, params[0])], ValueError, "input 9"),
            ([(-1, 0, params[0])], ValueError, "input -1"), ([(1, -1, params[0])], ValueError, "input 1"),
            ([(1, 0, params[0]), (1, 1, params[1])], ValueError, "input 1"),
            ([(1, 0, params[0]), (2, 0, params[0])], ValueError, "position 0 is given twice"),
            ([(1, 1, params[0])], RuntimeError, "not the one that forward read"),
            ([(1, 7, params[0])], RuntimeError, "lost a parameter"),
            ([(1, 2)], TypeError, None), ([3], TypeError, None)):
        with pytest.raises(error, match=match):
            backward(run(), targets)
    with pytest.raises(TypeError, match="a byte per target"):
        backward(run(), [(1, 0, params[0])], bytearray())
    with pytest.raises(TypeError, match="a Run is expected"):
        backward((3, [], []), [])
    opened_run, saved, grads = run()
    with pytest.raises(ValueError, match="but none is given"):
        opened_run.backward(saved, grads)
    with pytest.raises(RuntimeError, match="already called"):
        backward((opened_run, saved, grads), [])
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
