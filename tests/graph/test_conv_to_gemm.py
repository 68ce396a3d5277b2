"""A Conv whose kernel covers the whole input becomes a Gemm, with eager's results and gradients; others stay."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from test_fuse_gemm import random, session_of, step

from onnxtrain import _C

COVERED = [
    ((6, 5, 1, 1), (7, 5, 1, 1), {}), ((1, 3, 1), (4, 3, 1), {"strides": [2]}), ((3, 4, 2, 5), (6, 4, 2, 5), {}),
    ((2, 3, 2, 1, 3), (4, 3, 2, 1, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 1, 3]}), ((5, 1, 4, 4), (1, 1, 4, 4), {"pads": [0] * 4}),
]
LEFT = [
    ((2, 4, 1, 1), (4, 4, 3, 3), {"pads": [1] * 4}), ((2, 4, 1, 1), (4, 1, 1, 1), {"group": 4}),
    ((2, 4, 3, 3), (4, 4, 1, 1), {}), ((2, 4, 3, 3), (4, 4, 3, 3), {"pads": [2, 2, 0, 0], "strides": [3, 3]}),
    ((0, 4, 1, 1), (4, 4, 1, 1), {}),
]


def tensors_of(shape, weight, bias, dtype):
    sizes = [shape, weight, *([weight[:1]] if bias else [])]
    return [random(*size, dtype=dtype, seed=i) for i, size in enumerate(sizes)]


def run(tensors, attributes):
    names = ["x", "w", "b"][:len(tensors)]
    session = session_of([helper.make_node("Conv", names, ["y"], **attributes)], dict(zip(names, tensors, strict=True)))
    y, = session.forward(tensors, bytes(len(tensors)))[0]
    return step(session, tensors, [random(*y.shape, dtype=y.dtype, seed=9)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize(("shape", "weight", "attributes"), COVERED, ids=str)
def test_equals_torch(shape, weight, attributes, bias, dtype):
    tensors = tensors_of(shape, weight, bias, dtype)
    results, text = run(tensors, attributes)
    assert "Conv" not in text and "MatMul" in text, text
    wide = [t.double().requires_grad_() for t in tensors]
    convolution = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
    y = convolution(*wide, stride=attributes.get("strides", 1))
    y.backward(random(*y.shape, dtype=dtype, seed=9).double())
    tolerance = {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    for got, want in zip(results, [y, *[t.grad for t in wide]], strict=True):
        torch.testing.assert_close(got.double(), want.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("shape", "weight", "attributes"), LEFT, ids=str)
def test_others_stay(shape, weight, attributes):
    assert "Conv" in run(tensors_of(shape, weight, True, torch.float32), attributes)[1]


def test_it_can_be_disabled():
    _C.disable_passes(["conv_to_gemm"])
    try:
        assert "Conv" in run(tensors_of(*COVERED[0][:2], True, torch.float32), {})[1]
    finally:
        _C.disable_passes([])


@pytest.mark.parametrize(("op", "value"), [("Conv", 0.0), ("ConvTranspose", 0.0), ("Conv", 1.0)])
def test_a_bias_of_zeros_is_removed(op, value):
    tensors = [random(*sizes, dtype=torch.float32, seed=1) for sizes in ((2, 4, 5, 5), (4, 4, 3, 3))]
    bias = helper.make_node("Constant", [], ["b"], value=onnx.numpy_helper.from_array(np.full(4, value, np.float32)))
    session = session_of([bias, helper.make_node(op, ["x", "w", "b"], ["y"])], dict(zip("xw", tensors, strict=True)))
    wide = [t.double().requires_grad_() for t in tensors]
    y = (F.conv2d if op == "Conv" else F.conv_transpose2d)(*wide, torch.full((4,), value).double())
    dy = random(*y.shape, dtype=torch.float32, seed=9)
    y.backward(dy.double())
    results, text = step(session, tensors, [dy])
    line = next(line for line in text.splitlines() if f"{op} " in line)
    assert ("(x, w, )" in line) == (value == 0), line
    for got, want in zip(results, [y, *[t.grad for t in wide]], strict=True):
        torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=1e-5)
