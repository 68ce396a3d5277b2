"""Run.deliver() writes gradients to their receivers, or adds to them, and refuses receivers that do not fit."""

import pytest
import torch
from onnx import TensorProto, helper

from onnxtrain import _C


def run_of():
    """Of y = w * x a Run, and what backward() takes; w is input 0."""
    graph = helper.make_graph(
        [helper.make_node("Mul", ["w", "x"], ["y"])], "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "wx"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    session = _C.Session(model.SerializeToString())
    w, x = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    outputs, run = session.forward((w, x), bytes([2, 1]), 0)
    saved = [(w, x)[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    return run, saved, (torch.ones(3),), x


@pytest.mark.parametrize("add", [False, True])
def test_deliver_writes_or_adds(add):
    run, saved, grads, x = run_of()
    to, told = torch.full((3,), 10.0), []
    found = run.deliver(saved, grads, [(0, to, add)], told.append)
    assert found[0] is None and torch.equal(found[1], torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(to, x + 10 if add else x) and told == [0]
    with pytest.raises(RuntimeError, match="already called"):
        run.deliver(saved, grads, [])


def test_deliver_raises_what_the_function_raises():
    run, saved, grads, _ = run_of()

    def fails(index):
        raise KeyError(f"input {index}")

    with pytest.raises(KeyError, match="input 0"):
        run.deliver(saved, grads, [(0, torch.zeros(3), False)], fails)


@pytest.mark.parametrize("receivers,error,text", [
    ([(0, torch.zeros(4), False)], ValueError, "receiver 0 is not contiguous, or has another dtype or shape"),
    ([(0, torch.zeros(3, dtype=torch.float64), False)], ValueError, "another dtype"),
    ([(0, torch.zeros(6)[::2], False)], ValueError, "not contiguous"),
    ([(2, torch.zeros(3), False)], ValueError, "there is no input 2"),
    ([(0, torch.zeros(3), False)] * 2, ValueError, "is given twice"),
    ([0], TypeError, "a receiver is not a tuple"), ([(0, None, False)], TypeError, "receiver 0")])
def test_deliver_refuses_what_does_not_fit(receivers, error, text):
    run, saved, grads, x = run_of()
    with pytest.raises(error, match=text):
        run.deliver(saved, grads, receivers)
    with pytest.raises(ValueError, match="which backward reads, shares memory with the gradient of input 0"):
        run.deliver(saved, grads, [(0, x, False)])
    to = torch.zeros(3)
    run.deliver(saved, grads, [(0, to, False)])  # the run is still open
    assert torch.equal(to, x)
