"""Steps of a tile convert 16-bit floats within it, and the last result may take the place of an operand."""

import numpy as np
import onnx
import torch
from onnx import helper
from test_fuse_elementwise import both, model_of, passes_as_they_were  # noqa: F401

from onnxtrain import _C


def test_half_precision_stays_in_the_tile():
    """Nodes that compute 16-bit floats through float32 convert within the group."""
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Tanh", ["a"], ["t"]),
             helper.make_node("Mul", ["t", "x"], ["y"])]
    model = model_of(nodes, [("x", (4, 128)), ("b", (128,))], ["y"], onnx.TensorProto.BFLOAT16)
    text = both(model, [torch.randn(4, 128).bfloat16(), torch.randn(128).bfloat16()])
    assert "Cast Add Cast Cast Tanh Cast Cast Mul Cast" in text.split("# backward")[0]


def test_result_over_an_operand():
    """The last result takes an operand's place while earlier steps still read it, tile by tile."""
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("MatMul", ["e", "w"], ["m"]),
             helper.make_node("Tanh", ["m"], ["t"]), helper.make_node("Add", ["t", "m"], ["s"]),
             helper.make_node("Mul", ["s", "m"], ["y"])]
    x, w = torch.randn(300, 64) * 0.1, torch.randn(64, 64) * 0.1
    model = model_of(nodes, [("x", (300, 64)), ("w", (64, 64))], ["y"])
    both(model, [x, w], wants=b"\0\0")
    m = (x.double().exp() @ w.double()).float().numpy()
    got = _C.Session(model).forward([x, w], b"\0\0")[0][0].numpy()
    np.testing.assert_allclose(got, (np.tanh(m) + m) * m, rtol=1e-4, atol=1e-5)
