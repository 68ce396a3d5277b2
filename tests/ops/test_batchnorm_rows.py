"""Batch normalisation by rows and by channels, in every float, is that of the reference on any number of threads."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from harness import Case, R, call, session_of
from onnx import TensorProto, ValueInfoProto, helper
from test_batchnorm import EPS, MOMENTUM, inference, operands, training

from onnxtrain import _C


def step(arrays, threads=1, disabled=(), training_mode=1):
    """Outputs and gradients of one node, and the names of its kernels."""
    attrs = {"epsilon": EPS, "momentum": MOMENTUM, "training_mode": training_mode}
    case = Case("BatchNormalization", operands(*arrays[0].shape), attrs,
                n_outputs=3 if training_mode else 1, opset=15)
    _C.disable_kernels(list(disabled))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        session = session_of(case, arrays)
        dy = torch.from_numpy(R(*arrays[0].shape).make(7).astype(arrays[0].dtype))
        outputs, grads = call(session, [torch.from_numpy(a) for a in arrays], bytes([1, 1, 1, 0, 0]),
                              [dy, None, None] if training_mode else [dy])
        return [t.numpy() for t in (*outputs, *grads[:3])], {kernel for _, kernel, _ in session.kernels()}
    finally:
        torch.set_num_threads(before)
        _C.disable_kernels([])


ROWS = [*[(35, c) for c in range(1, 18)], (1, 3), (2, 5, 16), (130, 1), (67, 129), (33, 1030), (700, 3, 2), (40, 21, 7),
        (9, 300, 5), (66, 40, 3, 3), (1600, 640), (20, 2, 8, 8)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rows(shape, dtype):
    """All channels of some rows at a time, as the reference has it, with the same bits for any number of threads."""
    arrays = [spec.make(i).astype(dtype) for i, spec in enumerate(operands(*shape))]
    arrays[0] = arrays[0] + 30 * arrays[3].reshape(-1, *[1] * (len(shape) - 2))
    arrays[0][0] += 200  # an outlier in the row that the first differences are from
    for training_mode in (1, 0):
        ours, kernels = step(arrays, training_mode=training_mode)
        assert kernels == {"batchnorm_rows", "batchnorm_grad_rows"}
        others, _ = step(arrays, disabled=["batchnorm_rows", "batchnorm_grad_rows", "batchnorm_simd", "batchnorm_grad_simd"],
                         training_mode=training_mode)
        for got, want in zip(ours, others, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=(2e-5 if dtype is np.float32 else 1e-11) * max(1, abs(want).max()))
        for threads in (2, 3) if shape[0] * shape[1] > 4000 else ():
            again, _ = step(arrays, threads, training_mode=training_mode)
            assert all(np.array_equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(4, 3), (33, 19), (2, 3, 64, 64)], ids=str)
def test_rows_with_running_statistics_that_are_not_finite(shape, dtype):
    """The input's gradient is that of a product, and finite wherever that is."""
    arrays = [spec.make(i).astype(dtype) for i, spec in enumerate(operands(*shape))]
    arrays[0].reshape(-1)[[1, 5]] = np.nan, np.inf
    arrays[3][2] = np.inf
    leaf = torch.from_numpy(arrays[0]).requires_grad_()
    dy = torch.from_numpy(R(*shape).make(7).astype(dtype))
    (want,) = torch.autograd.grad(inference(leaf, *map(torch.from_numpy, arrays[1:])), leaf, dy)
    assert want.isfinite().all()
    names = ["batchnorm_rows", "batchnorm_grad_rows", "batchnorm_simd", "batchnorm_grad_simd"]
    for disabled in ([], names[:2], names):
        (_, dx, *_), _ = step(arrays, disabled=disabled, training_mode=0)
        np.testing.assert_allclose(dx, want.numpy(), rtol=1e-5)


def session_in_bfloat16(shape, training_mode, residual, relu):
    """BatchNormalization of x in bfloat16 with channels in float32, and what is fused with it."""
    names, shapes = ["x", *"sbmv", "r"], [shape, *[shape[1:2]] * 4, shape]
    kinds = [TensorProto.BFLOAT16, *[TensorProto.FLOAT] * 4, TensorProto.BFLOAT16]
    inputs = [helper.make_tensor_value_info(*i) for i in zip(names, kinds, shapes)][:6 if residual else 5]
    outputs = ["norm", "mean", "var"][:3 if training_mode else 1]
    nodes = [helper.make_node("BatchNormalization", names[:5], outputs, epsilon=EPS, momentum=MOMENTUM,
                              training_mode=training_mode)]
    if residual:
        nodes.append(helper.make_node("Add", [nodes[-1].output[0], "r"], ["sum"]))
    if relu:
        nodes.append(helper.make_node("Relu", [nodes[-1].output[0]], ["relu"]))
    outputs[0] = nodes[-1].output[0]
    graph = helper.make_graph(nodes, "norm", inputs, [ValueInfoProto(name=n) for n in outputs])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())


def rounded_once(got, want, size):
    """Half a unit in the last place of bfloat16, and the error of sums in float32."""
    assert got.dtype == torch.bfloat16
    return ((got.double() - want).abs() <= 2.0**-8 * want.abs() + 4e-6 * size).all()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training_mode", [0, 1])
@pytest.mark.parametrize("shape, kernel, residual", [
    *[(shape, "bf16", residual) for residual in (False, True)
      for shape in ((2, 3, 7, 9), (3, 70, 33), (2, 3, 64, 64), (1, 5, 1100), (2, 17, 16, 16))],
    ((40, 6, 3, 3), "rows", False), ((33, 19), "rows", False)], ids=str)
def test_bfloat16(shape, kernel, training_mode, residual, relu):
    """x and y in bfloat16: statistics and arithmetic in float32, one rounding behind the residual and the Relu. The
    kernel by rows is for float32; an Add behind it is a node of its own, as in eager.
    """
    arrays = [torch.from_numpy(spec.make(i)).float() for i, spec in enumerate([*operands(*shape), R(*shape)])]
    tensors = [arrays[0].bfloat16(), *arrays[1:5], arrays[5].bfloat16()][:6 if residual else 5]
    s = session_in_bfloat16(shape, training_mode, residual, relu)
    wanted = [1, 1, 1, 0, 0, 1][:len(tensors)]
    dy = torch.from_numpy(R(*shape).make(7)).bfloat16()
    outputs, run = s.forward(tensors, bytes(wanted))
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    grads = run.backward(saved, [dy, None, None][:len(run.differentiable)])
    leaves = [t.double().requires_grad_(bool(w)) for t, w in zip(tensors, wanted)]
    y, *statistics = training(*leaves[:5]) if training_mode else (inference(*leaves[:5]),)
    y = y + leaves[5] if residual else y
    y = y.relu() if relu else y
    wants = torch.autograd.grad(y, [leaf for leaf, w in zip(leaves, wanted) if w], dy.double())
    assert rounded_once(outputs[0], y.detach(), 8)
    for got, want in zip(outputs[1:], statistics, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want.detach(), atol=1e-6, rtol=1e-6)
    given = [g for g, w in zip(grads, wanted) if w]
    assert rounded_once(given[0], wants[0], 8 * wants[0].abs().max())
    for got, want in zip(given[1:3], wants[1:3]):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=1e-5 * want.abs().max().item(), rtol=1e-5)
    if residual:
        assert torch.equal(given[3].double(), wants[3])
    names = {k for _, k, _ in s.kernels() if "batchnorm" in k}
    assert names == {f"batchnorm_{kernel}", f"batchnorm_grad_{kernel}"}


@pytest.mark.parametrize("isa", ["avx2", "plain"])
def test_rows_with_less(isa):
    """In a process of its own: the instruction set is chosen once."""
    options = ["-q", "-p", "no:cacheprovider", __file__, "-k", "(test_rows or bfloat16) and not less"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], env={**os.environ, "ONNXTRAIN_ISA": isa},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("shape, kernel", [((1568, 640), "rows"), ((256, 2048, 1, 1), "rows"), ((200000, 3), "rows"),
                                           ((32, 16, 7, 7), "rows"), ((4, 3, 64, 64), "simd"), ((2, 8, 5, 5), "simd")], ids=str)
def test_no_channel_by_channel_walk_over_far_elements(shape, kernel):
    arrays = [np.ones(spec.shape, np.float32) for spec in operands(*shape)]
    assert step(arrays)[1] == {f"batchnorm_{kernel}", f"batchnorm_grad_{kernel}"}
