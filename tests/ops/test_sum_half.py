"""Sums of columns of 16-bit floats, as a bias has its gradient: one pass, float32 on the way, rounded once."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from onnxtrain import _C

COLUMNS = [((700, 3052), [0]), ((3, 50, 1000), [1]), ((4, 6, 16), [0, 1]), ((5, 16), [0]), ((3, 50, 513), [1]),
           ((2, 1, 9, 512), [2])]
OTHERS = [((1, 600), [0]), ((2, 3, 4), [0]), ((9, 0), [0]), ((0, 20), [0]), ((30, 40), [1])]


def reduced(op_type, x, axes, keepdims):
    """The result and the kernel of the reduction."""
    constant = onnx.numpy_helper.from_array(np.array(axes, dtype=np.int64), "axes")
    code = 16 if x.dtype == torch.bfloat16 else 10
    graph = helper.make_graph([helper.make_node(op_type, ["x", "axes"], ["y"], keepdims=keepdims)], "g",
                              [helper.make_tensor_value_info("x", code, x.shape)], [onnx.ValueInfoProto(name="y")],
                              [constant])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                           ir_version=10).SerializeToString())
    (y,), _ = session.forward([x], b"\0")
    return y, [kernel for node, kernel, _ in session.kernels() if node.startswith("Reduce")]


@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=["bf16", "f16"])
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("shape, axes", COLUMNS + OTHERS, ids=str)
def test_sum(shape, axes, op_type, dtype, tol):
    if 0 in shape and op_type == "ReduceMean":
        op_type = "ReduceSum"
    x = torch.from_numpy(np.random.default_rng(3).normal(size=shape)).to(dtype)
    exact = (x.double().sum if op_type == "ReduceSum" else x.double().mean)(dim=axes)
    for keepdims in (0, 1):
        y, kernels = reduced(op_type, x, axes, keepdims)
        assert y.dtype == dtype and (kernels == ["reduce_sum_half"]) == ((shape, axes) in COLUMNS), kernels
        # half a step of rounding, and what float32 loses where terms cancel
        assert torch.all((y.double().view(exact.shape) - exact).abs() <= 0.51 * 2 * tol * exact.abs() + 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_as_widened(dtype):
    """The numbers are those of the float32 kernel between Casts."""
    x = torch.from_numpy(np.random.default_rng(4).normal(size=(77, 1300))).to(dtype)
    y, _ = reduced("ReduceSum", x, [0], 0)
    _C.disable_kernels(["reduce_sum_half"])
    _C.disable_passes(["fuse_reductions"])  # which would sum what the Cast gives as it comes
    try:
        widened, kernels = reduced("ReduceSum", x, [0], 0)
    finally:
        _C.disable_kernels([])
        _C.disable_passes([])
    assert kernels == ["reduce_sum_f32"] and torch.equal(y, widened)
