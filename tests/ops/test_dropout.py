"""Dropout drops and scales by its ratio, and its gradient regenerates the mask."""

import numpy as np
import pytest
import torch
from harness import C, Case, R, call, check_allocation_failures, expect_error, run_case, session_of
from onnx import TensorProto
from test_random import masks, model, sigmas

from onnxtrain import _C

KERNELS = next(op["kernels"] for op in _C.operators() if op["name"] == "Dropout")


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("elem, dtype", [(TensorProto.FLOAT, torch.float32), (TensorProto.DOUBLE, torch.float64)])
def test_rate_and_scale(ratio, elem, dtype):
    n = 400_001
    (y,), _ = model(ratio=ratio, elem=elem).forward([torch.full((n,), 3.0, dtype=dtype)], b"\0", 5)
    kept = y != 0
    assert sigmas(kept.sum(), n, 1 - ratio) < 5
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 3 / (1 - ratio)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [0, 1, 3, 63, 64, 65, 257, 100_003])
def test_mask_output(n):
    session = model(ratio=0.4, mask=True)
    x = torch.randn(n)
    (y, m), _ = session.forward([x], b"\0", 3)
    assert m.dtype == torch.bool and m.shape == x.shape
    torch.testing.assert_close(y, torch.where(m, x / 0.6, torch.zeros(())))


@pytest.mark.parametrize("dtype, elem", [(torch.float32, TensorProto.FLOAT), (torch.float64, TensorProto.DOUBLE)])
@pytest.mark.parametrize("shape", [(1,), (7, 13), (4, 25, 101), (300, 301)])
def test_gradient_is_the_mask(shape, dtype, elem):
    session = model(nodes=2, ratio=0.25, elem=elem)
    x = torch.rand(shape, dtype=dtype) + 0.5  # no zeros of its own: a dropped element is known by its zero
    dy = torch.rand(shape, dtype=dtype) + 0.5  # nor of this
    for only in (0, 1):
        outputs, grads = call(session, [x], b"\1", [dy if i == only else None for i in range(2)], seed=11)
        scale = torch.where(outputs[only] != 0, torch.tensor(1 / 0.75, dtype=dtype), torch.zeros((), dtype=dtype))
        torch.testing.assert_close(grads[0], dy * scale, rtol=1e-6, atol=0)
        assert torch.equal(grads[0] != 0, outputs[only] != 0)


def test_overlapping_runs_keep_their_masks():
    """Two forwards before their backwards, in both orders."""
    session = model(ratio=0.5)
    x, dy = torch.ones(5000), torch.ones(5000)
    (a,), run_a = session.forward([x], b"\1", 1)
    (b,), run_b = session.forward([x], b"\1", 2)
    grads = {}
    for name, run, out in (("b", run_b, b), ("a", run_a, a)):
        saved = [x] * len(run.saved_inputs) + [out] * len(run.saved_outputs)
        (grads[name],) = run.backward(saved, [dy])
    assert torch.equal(grads["a"], a) and torch.equal(grads["b"], b) and not torch.equal(a, b)


@pytest.mark.parametrize("ratio, training", [(0.0, True), (0.3, False), (0.0, False)])
def test_identity(ratio, training):
    session = model(ratio=ratio, training=training, mask=True)
    x, dy = torch.randn(33, 5), torch.randn(33, 5)
    outputs, grads = call(session, [x], b"\1", [dy, None], seed=1)
    assert torch.equal(outputs[0], x) and bool(outputs[1].all()) and torch.equal(grads[0], dy)


def test_everything_dropped():
    session = model(ratio=1.0)
    outputs, grads = call(session, [torch.randn(1000)], b"\1", [torch.randn(1000)], seed=1)
    assert not outputs[0].any() and not grads[0].any()


def test_kernels_and_threads_draw_the_same_mask():
    n, drawn = 100_003, []
    threads = torch.get_num_threads()
    try:
        for kernel in KERNELS:
            _C.disable_kernels([k for k in KERNELS if k != kernel])
            for count in (1, 2):
                torch.set_num_threads(count)
                drawn.append(masks(model(ratio=0.3), n, 77)[0])
    finally:
        torch.set_num_threads(threads)
        _C.disable_kernels([])
    assert all(torch.equal(drawn[0], m) for m in drawn)


def test_harness_in_evaluation():
    run_case(Case("Dropout", [R(3, 5), C(0.5, np.float32), C(False, bool)], torch=lambda x, r, t: x.clone()))


def test_allocation_failures_in_training():
    check_allocation_failures(Case("Dropout", [R(3, 5), C(0.5, np.float32), C(True, bool)]))


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_bad_ratio(ratio):
    expect_error(Case("Dropout", [R(3), C(ratio, np.float32), C(True, bool)]), ValueError, "ratio")


def test_run_time_ratio():
    """The ratio is read when the program is built: one that depends on data is probed, not taken for the default."""
    case = Case("Dropout", [R(1000), np.array(0.25, np.float32), C(True, bool)])
    arrays = [np.ones(1000, np.float32), np.array(0.25, np.float32), np.array(True)]
    session = session_of(case, arrays)
    for ratio in (0.25, 0.75):
        (y,), _ = call(session, [torch.ones(1000), torch.tensor(ratio)], bytes(2), None, seed=3)
        assert abs(float((y == 0).double().mean()) - ratio) < 0.06
        assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - ratio)))
