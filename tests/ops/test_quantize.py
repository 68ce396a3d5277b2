"""Quantisation: levels against the reference evaluator, gradients straight through against torch's fake
quantisation.
"""

import numpy as np
import onnx
import pytest
import torch
from harness import C, Case, R, V, assert_close, call, expect_error, run_case
from onnx import helper, numpy_helper

from onnxtrain import _C


def flat(op_type, *inputs, **more):
    return Case(op_type, list(inputs), grad=False, dtypes=[np.float32], **more)


SCALE = V([0.5, 0.25, 0.1])
CASES = [
    flat("QuantizeLinear", R(5, 7, low=-100, high=100), V(0.7), C(3, np.uint8)),
    flat("QuantizeLinear", R(5, 7, low=-100, high=100), V(0.7), C(-3, np.int8)),
    flat("QuantizeLinear", V([np.inf, -np.inf, 1e30, 0.5, 1.5, 2.5, -0.5]), V(1.0), name="extremes",
         reference=lambda x, s: np.array([255, 0, 255, 0, 2, 2, 0], np.uint8)),
    flat("QuantizeLinear", R(2, 3, 4, low=-9, high=9), SCALE, V([1, 2, 3], np.int16), attrs={"axis": 1}, opset=21),
    flat("QuantizeLinear", R(2, 5, low=-9, high=9), R(2, 2, low=0.1, high=1),
         attrs={"axis": 1, "block_size": 3, "output_dtype": 3}, opset=21),
    flat("QuantizeLinear", R(0, 3), V(1.0), name="empty"),
    *(flat("QuantizeLinear", R(3, 37, low=-9, high=9), V(0.3, t), C(2, np.int8), name=f"scale of {np.dtype(t)}",
           reference=lambda x, s, z: (np.rint(x / s.astype(np.float32)) + z).clip(-128, 127).astype(np.int8))
      for t in (np.float32, np.float64)),
    flat("QuantizeLinear", R(4, 9, dtype=np.int32, low=-90000, high=90000), V(1000.0), C(-5, np.int16), opset=21,
         name="of int32", reference=lambda x, s, z: (np.rint(x / s.astype(np.float64)) + z).astype(np.int16)),
    flat("QuantizeLinear", R(3, 5, low=-9, high=9), V(0.7), attrs={"output_dtype": 10 + 12}, opset=21, name="to int4",
         reference=lambda x, s: np.rint(x / s).clip(-8, 7).astype(np.int8)),
    flat("QuantizeLinear", R(3, 5, low=-9, high=9), V(0.7), attrs={"precision": 10, "output_dtype": 3}, opset=23,
         name="in float16", reference=lambda x, s: np.rint(
x.astype(np.float16) / s.astype(np.float16)).astype(np.int8)),
    Case("DequantizeLinear", [R(2, 3, 4, low=-100, high=100, dtype=np.int8), SCALE, V([1, 2, 3], np.int8)],
         {"axis": 1}, opset=21, torch=lambda x, s, z: (x.to(s.dtype) - z[:, None]) * s[:, None], dtypes=[np.float32]),
    Case("DequantizeLinear", [R(2, 5, low=-100, high=100, dtype=np.int16), R(2, 2)], {"axis": 1, "block_size": 3},
         opset=21, torch=lambda x, s: x * s.repeat_interleave(3, 1)[:, :5], dtypes=[np.float32]),
    Case("DequantizeLinear", [R(4, low=-100, high=100, dtype=np.int32), R()], opset=21, torch=lambda x, s: x * s,
         dtypes=[np.float32]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def fake_quantize(x_shape, scale, zero, dtype, **attrs):
    """A session of DequantizeLinear(QuantizeLinear(x, scale, zero), scale, zero)."""
    inputs = ["x", "s", "z"]
    nodes = [helper.make_node("QuantizeLinear", inputs, ["q"], **attrs),
             helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **attrs)]
    graph = helper.make_graph(nodes, "fake", [helper.make_tensor_value_info("x", 1, x_shape),
                                              helper.make_tensor_value_info("s", 1, scale.shape)],
                              [onnx.ValueInfoProto(name="y")], [numpy_helper.from_array(np.asarray(zero, dtype), "z")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)],
                                        ir_version=10).SerializeToString())


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("mask", [b"\1\0", b"\0\1", b"\1\1"])
def test_straight_through(per_channel, mask):
    x = torch.linspace(-40, 40, 60).reshape(4, 3, 5)[:, :, [2, 0, 4, 1, 3]].contiguous()
    scale = torch.tensor([0.21, 0.13, 0.33]) if per_channel else torch.tensor(0.21)
    zero = [5, -7, 0] if per_channel else 5
    attrs = {"axis": 1} if per_channel else {}
    dy = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, x.shape).astype(np.float32))
    (y,), grads = call(fake_quantize(x.shape, scale, zero, np.int8, **attrs), [x, scale], mask, [dy])
    xt, st = x.clone().requires_grad_(), scale.clone().requires_grad_()
    if per_channel:
        want = torch._fake_quantize_learnable_per_channel_affine(xt, st, torch.tensor(zero, dtype=torch.float32), 1,
                                                                 -128, 127, 1.0)
    else:
        want = torch._fake_quantize_learnable_per_tensor_affine(xt, st.reshape(1), torch.tensor([float(zero)]), -128,
                                                                127, 1.0)
    dx, ds = torch.autograd.grad(want, [xt, st], dy)
    assert_close(y.numpy(), want.detach().numpy(), "levels")
    assert (mask[0] == 1) == (grads[0] is not None) and (mask[1] == 1) == (grads[1] is not None)
    if grads[0] is not None:
        assert_close(grads[0].numpy(), dx.numpy(), "dx")
        assert 0 < int((grads[0] == 0).sum()) < x.numel(), "some are clipped"
    if grads[1] is not None:
        assert_close(grads[1].numpy(), ds.numpy(), "d scale", 2e-5)


def test_errors():
    expect_error(Case("QuantizeLinear", [R(2, 3), V([1.0, 2.0])], dtypes=[np.float32]), ValueError,
                 "the scale of shape [2]")
    expect_error(Case("DequantizeLinear", [R(2, dtype=np.bool_), V(1.0)], dtypes=[np.float32]), TypeError, "bool")
    expect_error(Case("DequantizeLinear", [R(2, dtype=np.int8), V(1.0), C(1, np.uint8)], dtypes=[np.float32]),
                 TypeError, "zero point")
