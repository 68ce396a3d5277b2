"""The gradient pass adds up the gradients of a value's readers, and makes those that are wanted alone."""

import torch
from onnx import helper
from test_infer import session_of


def test_sums_over_readers_of_what_is_wanted():
    session = session_of([helper.make_node("Mul", ["x", "y"], ["p"]), helper.make_node("Add", ["p", "x"], ["s"]),
                          helper.make_node("Mul", ["s", "s"], ["z"])], ["x", "y"])
    x, y, dz = (torch.randn(3, 4) for _ in range(3))
    (z,), run = session.forward([x, y], b"\1\0")
    dx, dy = run.backward([[x, y][i] for i in run.saved_inputs] + [z for _ in run.saved_outputs], [dz])
    assert dy is None
    torch.testing.assert_close(dx, dz * 2 * (x * y + x) * (y + 1))
    assert session.forward([x, y], b"\0\0")[1] is None  # no gradient is wanted: there is no backward
