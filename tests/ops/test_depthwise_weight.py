"""Weight gradient of depthwise convolutions over images against torch in float64: filters, strides, dilations, paddings
and sizes, each instruction set, several threads; what the kernel declines.
"""

import os
import subprocess
import sys

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from onnxtrain import _C

OTHERS = [f"conv_grad_weight_{name}" for name in ("f32_depthwise", "f32_winograd", "f32_onednn", "gemm", "ref")]
# images, channels, sizes, filter, strides, pads (begins, ends), dilations
GEOMETRIES = [
    (2, 3, (9, 11), (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    (3, 5, (7, 7), (7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    (40, 3, (4, 4), (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),      # many images in a flat array
    (37, 2, (16, 15), (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),    # the last flat array is not full
    (1, 2, (80, 70), (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),     # one image is more than a flat array usually holds
    (5, 4, (14, 13), (5, 5), (2, 2), (2, 2, 2, 2), (1, 1)),
    (19, 3, (15, 16), (5, 3), (2, 3), (2, 0, 1, 1), (1, 1)),
    (3, 3, (23, 10), (4, 6), (3, 1), (0, 4, 2, 3), (1, 1)),
    (2, 3, (12, 12), (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
    (2, 3, (17, 19), (3, 3), (2, 2), (3, 1, 0, 4), (2, 3)),
    (2, 2, (12, 13), (9, 12), (1, 1), (0, 0, 0, 0), (1, 1)),    # one row of results
    (2, 2, (5, 5), (5, 5), (1, 1), (9, 9, 9, 9), (1, 1)),       # padding beyond the filter
    (2, 3, (9, 2), (5, 1), (4, 4), (2, 0, 2, 0), (1, 1)),       # strides beyond the image
    (4, 3, (1, 31), (1, 4), (1, 2), (0, 1, 0, 2), (1, 1)),
]


@pytest.fixture(autouse=True)
def reset():
    threads = torch.get_num_threads()
    yield
    _C.disable_kernels([])
    torch.set_num_threads(threads)


def session_of(x, w, strides, pads, dilations):
    node = helper.make_node("Conv", ["x", "w"], ["y"], strides=strides, pads=pads, dilations=dilations,
                            group=w.shape[0])
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, t.shape) for n, t in (("x", x), ("w", w))]
    graph = helper.make_graph([node], "conv", inputs, [onnx.ValueInfoProto(name="y")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())


def weight_grad(session, x, w, dy):
    outputs, run = session.forward([x, w], b"\0\1")
    saved = [[x, w][i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    return next(grad for grad in run.backward(saved, [dy]) if grad is not None)


def assert_close(got, want, dy):
    """By the error of float32's sums of as many terms as a channel of dy has."""
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6 * (dy[:, 0].numel() ** 0.5 + 10))


def problem(n, channels, sizes, taps, strides, pads, dilations):
    """x, w, dy, and torch's gradient of w in float64."""
    torch.manual_seed(0)
    x, w = torch.randn(n, channels, *sizes), torch.randn(channels, 1, *taps)
    wide = w.double().requires_grad_()
    y = F.conv2d(F.pad(x.double(), (pads[1], pads[3], pads[0], pads[2])), wide, stride=strides, dilation=dilations,
                 groups=channels)
    dy = torch.randn(y.shape)
    y.backward(dy.double())
    return x, w, dy, wide.grad


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_equals_torch(geometry):
    x, w, dy, want = problem(*geometry)
    _C.disable_kernels(OTHERS)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        session = session_of(x, w, *geometry[4:])
        for _ in range(2):  # the second one on memory that has been used
            assert_close(weight_grad(session, x, w, dy), want, dy)


@pytest.mark.parametrize("isa", ["plain", "avx2"])
def test_of_each_instruction_set(isa):
    options = ["-q", "-p", "no:cacheprovider", __file__, "-k", "test_equals_torch"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], env={**os.environ, "ONNXTRAIN_ISA": isa},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(GEOMETRIES)} passed" in done.stdout


def test_an_infinity_stays_in_its_channel():
    """Though channels follow one another in the same memory, and the last images do not fill it."""
    geometry = GEOMETRIES[3]
    x, w, dy, want = problem(*geometry)
    x[-1, 0, 3, 3] = torch.inf
    _C.disable_kernels(OTHERS)
    torch.set_num_threads(1)
    got = weight_grad(session_of(x, w, *geometry[4:]), x, w, dy)
    assert not got[0].isfinite().all()
    assert_close(got[1:], want[1:], dy)


@pytest.mark.parametrize(("change", "reason"), [
    ({"taps": (3, 3)}, "a small filter"), ({"strides": (5, 4)}, "large strides"), ({"taps": (12, 11)}, "too many taps")])
def test_declines(change, reason):
    geometry = {"n": 2, "channels": 3, "sizes": (14, 13), "taps": (5, 5), "strides": (1, 1), "pads": (2, 2, 2, 2),
                "dilations": (1, 1)} | change
    x, w, dy, want = problem(*geometry.values())
    session = session_of(x, w, *list(geometry.values())[4:])
    assert_close(weight_grad(session, x, w, dy), want, dy)  # by another one
    _C.disable_kernels(OTHERS)
    with pytest.raises(_C.UnsupportedError, match=reason):
        weight_grad(session_of(x, w, *list(geometry.values())[4:]), x, w, dy)
