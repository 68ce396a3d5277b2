"""Conv and its two gradients in bfloat16: which kernel takes what, and that sums are float32 and are rounded once.

Against torch in float64 on the same operands. A shape is (images, channels, size...), (filters, channels of a group,
kernel...), strides, dilations, pads, with a bias or without.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, ValueInfoProto, helper
from seeds import fixed_seed

from onnxtrain import _C

SEED = fixed_seed()
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
ULP = 2.0**-7  # of bfloat16, relative: one rounding is off by half of it at most
FLAGS = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
MULTIPLIES = "avx512_bf16" in FLAGS and _C.build_info()["isa"] == "avx512"
HAS_TILES = "amx_bf16" in FLAGS  # oneDNN has them, too: the native GEMM leaves products to it


def session(x, w, stride, dilation, pad, bias):
    spatial = len(x) - 2
    names = ["x", "w", "b"][:2 + bias]
    node = helper.make_node("Conv", names, ["y"], strides=[stride] * spatial, dilations=[dilation] * spatial,
                            pads=[pad] * 2 * spatial, group=x[1] // w[1])
    inputs = [helper.make_tensor_value_info(n, TensorProto.BFLOAT16, s) for n, s in zip(names, (x, w, w[:1]))]
    graph = helper.make_graph([node], "conv", inputs, [ValueInfoProto(name="y")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())


def data(x, w, bias, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).bfloat16() for shape in (x, w, w[:1])[:2 + bias]]


def step(s, inputs, dy):
    outputs, run = s.forward(inputs, b"\1" * len(inputs))
    saved = [inputs[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    return [outputs[0], *run.backward(saved, [dy])]


def expected(inputs, dy, stride, dilation, pad):
    """y, dx and dw, and the same of the operands' sizes, by which sums of float32 may be off."""
    found = []
    for values in ([t.double() for t in (*inputs, dy)], [t.double().abs() for t in (*inputs, dy)]):
        *leaves, gradient = values
        leaves = [t.requires_grad_() for t in leaves]
        x, w = leaves[:2]
        y = CONV[x.dim() - 2](*leaves, stride=stride, dilation=dilation, padding=pad, groups=x.shape[1] // w.shape[1])
        y.backward(gradient)
        found.append([y.detach(), x.grad, w.grad])
    return found


def check(case):
    x, w, stride, dilation, pad, bias = case
    inputs = data(x, w, bias)
    s = session(*case)
    shape = CONV[len(x) - 2](*inputs, stride=stride, dilation=dilation, padding=pad, groups=x[1] // w[1]).shape
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    got = step(s, inputs, dy)
    wants, sizes = expected(inputs, dy, stride, dilation, pad)
    for name, g, want, size in zip(("y", "dx", "dw"), got, wants, sizes):
        limit = ULP / 2 * want.abs() + 2e-6 * size
        assert g.dtype == torch.bfloat16 and ((g.double() - want).abs() <= limit).all(), (case, name)
    return {k for _, k, _ in s.kernels() if k.startswith("conv")}, got


def parts(kernel):
    return {f"conv{part}_{kernel}" for part in ("", "_grad_input", "_grad_weight")}


DIRECT = [
    ((2, 32, 9, 11), (48, 32, 3, 3), 1, 1, 1, False), ((1, 33, 19, 21), (17, 33, 3, 3), 1, 1, 1, True),
    ((12, 16, 12, 7), (32, 16, 3, 3), 2, 1, 1, False), ((3, 16, 12, 13), (16, 16, 3, 3), 1, 2, 2, True),
    ((20, 16, 31), (24, 16, 5), 1, 1, 2, False), ((2, 16, 5, 6, 7), (24, 16, 3, 3, 3), 1, 1, 1, True),
    ((8, 32, 9, 11), (48, 32, 1, 1), 1, 1, 0, True), ((2, 16, 64, 64), (16, 16, 4, 4), 4, 1, 0, False),
]


@pytest.mark.parametrize("case", DIRECT, ids=str)
def test_direct(case):
    kernels, _ = check(case)
    if MULTIPLIES and set(case[1][2:]) != {1}:
        assert kernels == parts("bf16_onednn"), kernels
    elif MULTIPLIES:  # the gradients have no bias, and are products
        assert "conv_bf16_onednn" in kernels and (HAS_TILES or "conv_grad_input_bf16_pointwise" in kernels), kernels


FLOAT32 = [((2, 8, 9, 11), (8, 8, 3, 3), 1, 1, 1, False),  # few multiplications
           ((2, 32, 9, 11), (48, 8, 3, 3), 1, 1, 1, False), ((2, 32, 9, 11), (32, 1, 3, 3), 1, 1, 1, True),
           ((2, 32, 9, 11), (64, 8, 1, 1), 1, 1, 0, False)]


@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_groups_and_small_ones_are_computed_in_float32(case):
    kernels, _ = check(case)
    assert not any("bf16" in k for k in kernels), kernels


def sampled(count):
    rng = random.Random(SEED)
    while count:
        rank, group = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 1, 2))
        kernel, stride = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
        dilation, pad = rng.choice((1, 1, 2)), rng.choice((0, 0, 1))
        size = [rng.randint(1, 17 if rank < 3 else 7) for _ in range(rank)]
        x = (rng.randint(1, 9), group * rng.choice((1, 3, 16, 20, 48)), *size)
        if min(x[2:]) + 2 * pad < (kernel - 1) * dilation + 1 or pad >= kernel:
            continue
        w = (group * rng.choice((1, 2, 16, 33)), x[1] // group, *[kernel] * rank)
        count -= 1
        yield x, w, stride, dilation, pad, rng.random() < 0.3


@pytest.mark.parametrize("case", sampled(60), ids=lambda case: f"seed{SEED}-{case}")
def test_sampled(case):
    check(case)


@pytest.mark.parametrize("isa", ["avx2", "plain"])
def test_with_less(isa):
    """Without instructions for bfloat16, operands are widened, as they were."""
    code = ("import test_conv_onednn as t\n"
            "for case in t.DIRECT[:3] + t.FLOAT32[:1]:\n"
            "    kernels, _ = t.check(case)\n"
            "    assert not any('bf16' in k for k in kernels), kernels\n")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "ONNXTRAIN_ISA": isa})
