"""Products of 16-bit operands within other kernels (csrc/device/half_product.c), through MatMulBnb4 and its gradient:
by the native GEMM and by oneDNN's primitive, and in float32 for few rows or where another implementation is asked for.
"""

from __future__ import annotations

import pytest
import torch
from harness import call
from onnx import TensorProto, helper

from onnxtrain import _C

DOMAIN = "com.microsoft"
N, K, BLOCK = 48, 320, 64
NF4 = torch.tensor([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
                    1.0])


def session():
    node = helper.make_node("MatMulBnb4", ["a", "b", "absmax"], ["y"], domain=DOMAIN, N=N, K=K, block_size=BLOCK,
                            quant_type=1)
    graph = helper.make_graph([node], "g", [
        helper.make_tensor_value_info("a", TensorProto.BFLOAT16, ["m", K]),
        helper.make_tensor_value_info("b", TensorProto.UINT8, [N * K // 2]),
        helper.make_tensor_value_info("absmax", TensorProto.FLOAT, [N * K // BLOCK])],
        [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, None)])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(
        DOMAIN, 1)]).SerializeToString())


def has_products():
    """Whether the processor multiplies bfloat16."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("rows", [1, 8, 9, 130])
@pytest.mark.parametrize("gemm", ["native", "onednn", "reference"])
def test_result_and_gradient(gemm, rows, monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_GEMM", gemm)
    rng = torch.Generator().manual_seed(rows)
    a, dy = (torch.randn(rows, width, generator=rng).bfloat16() for width in (K, N))
    codes = torch.randint(0, 256, (N * K // 2,), generator=rng, dtype=torch.uint8)
    absmax = torch.rand(N * K // BLOCK, generator=rng) + 0.5
    places = torch.stack([codes.long() >> 4, codes.long() & 15], 1).reshape(-1)
    weight = (NF4[places] * absmax.repeat_interleave(BLOCK)).bfloat16().double().reshape(N, K)

    made = session()
    (y,), grads = call(made, [a, codes, absmax], bytes([1, 0, 0]), [dy])
    for got, exact in ((y, a.double() @ weight.T), (grads[0], dy.double() @ weight)):
        assert got.dtype == torch.bfloat16
        rounding = 2**-8 * exact.abs() + 2**-18 * exact.abs().max()  # once, of a sum in float32
        assert ((got.double() - exact).abs() <= rounding).all()
    assert _C.build_info()["bfloat16_products"] == (gemm != "reference" and has_products())
    casts = sum(kernel.startswith("cast") for _, kernel, _ in made.kernels())
    assert bool(casts) == (rows <= 8 or gemm == "reference" or not has_products())
