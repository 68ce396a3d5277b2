"""Equal nodes become one, and nodes that nobody reads are removed."""

import pytest
import torch
from onnx import helper
from test_infer import session_of

from onnxtrain import _C


@pytest.mark.parametrize("disabled, count", [(["fuse_elementwise"], 1), (["fuse_elementwise", "cse"], 2)], ids=str)
def test_equal_and_unread_nodes(disabled, count):
    _C.disable_passes(disabled)
    try:
        session = session_of([helper.make_node("Softplus", ["x"], [name]) for name in "ab"] +
                             [helper.make_node("Tanh", ["x"], ["unread"]), helper.make_node("Add", ["a", "b"], ["z"])],
                             ["x"])
        x = torch.randn(3, 4)
        (z,), _ = session.forward([x], b"\0")
    finally:
        _C.disable_passes([])
    text = session.text("program")
    assert text.count("Softplus (") == count and "Tanh" not in text, text
    torch.testing.assert_close(z, 2 * torch.nn.functional.softplus(x))
