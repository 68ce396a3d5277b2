"""Milliseconds of each convolution kernel, forward and both gradients, in interleaved rounds: python
tests/bench/conv.py [PATTERN]

PATTERN keeps the shapes whose name has it. "-": the kernel declines the shape.

The shapes are those of the CNN and ResNet-18 workloads, of a depthwise block and of a 1-d and a 3-d network. A program
takes the first kernel that accepts; beside the milliseconds stands how many times the first kernel's they are.
"""

from __future__ import annotations

import statistics
import sys

import onnx
import torch
from onnx import helper

from onnxtrain import _C

# name, x, w, stride, padding, groups
SHAPES = [
    ("CNN first", (64, 1, 28, 28), (16, 1, 3, 3), 1, 1, 1),
    ("CNN second", (64, 16, 14, 14), (32, 16, 3, 3), 1, 1, 1),
    ("ResNet 64 at 32x32", (32, 64, 32, 32), (64, 64, 3, 3), 1, 1, 1),
    ("ResNet 128 at 16x16", (32, 128, 16, 16), (128, 128, 3, 3), 1, 1, 1),
    ("ResNet 256 at 8x8", (32, 256, 8, 8), (256, 256, 3, 3), 1, 1, 1),
    ("ResNet 512 at 4x4", (32, 512, 4, 4), (512, 512, 3, 3), 1, 1, 1),
    ("UNet 32 at 64x64", (4, 32, 64, 64), (32, 32, 3, 3), 1, 1, 1),
    ("VGG 128 to 256 at 28x28", (8, 128, 28, 28), (256, 128, 3, 3), 1, 1, 1),
    ("VGG 512 at 14x14", (8, 512, 14, 14), (512, 512, 3, 3), 1, 1, 1),
    ("ResNet down, 1x1", (32, 64, 32, 32), (128, 64, 1, 1), 2, 0, 1),
    ("pointwise", (32, 128, 16, 16), (256, 128, 1, 1), 1, 0, 1),
    ("ResNet-50, 1x1, 64 to 256 at 56x56", (2, 64, 56, 56), (256, 64, 1, 1), 1, 0, 1),
    ("ResNet-50, 1x1, 1024 to 256 at 14x14", (2, 1024, 14, 14), (256, 1024, 1, 1), 1, 0, 1),
    ("ResNet-50, 1x1, 512 to 2048 at 7x7", (2, 512, 7, 7), (2048, 512, 1, 1), 1, 0, 1),
    ("ResNet-50, 1x1, 512 to 1024, stride 2", (2, 512, 28, 28), (1024, 512, 1, 1), 2, 0, 1),
    ("depthwise", (32, 128, 16, 16), (128, 1, 3, 3), 1, 1, 128),
    ("7x7, three channels", (8, 3, 112, 112), (64, 3, 7, 7), 2, 3, 1),
    ("1-d", (16, 64, 512), (64, 64, 5), 1, 2, 1),
    ("3-d", (4, 16, 16, 16, 16), (32, 16, 3, 3, 3), 1, 1, 1),
]
KERNELS = ("f32_onednn", "f32_winograd", "gemm", "bf16_onednn", "bf16_pointwise")
PARTS = ("Conv", "ConvGradInput", "ConvGradWeight")


def session_of(x: tuple[int, ...], w: tuple[int, ...], stride: int, pad: int, groups: int, kind: int) -> _C.Session:
    rank = len(x) - 2
    node = helper.make_node("Conv", ["x", "w"], ["y"], strides=[stride] * rank, pads=[pad] * 2 * rank, group=groups)
    inputs = [helper.make_tensor_value_info(n, kind, s) for n, s in (("x", x), ("w", w))]
    graph = helper.make_graph([node], "conv", inputs, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return _C.Session(model.SerializeToString())


def step(session: _C.Session, x: torch.Tensor, w: torch.Tensor) -> dict[str, float]:
    """Seconds of each part."""
    outputs, run = session.forward([x, w], b"\1\1")
    saved = [[x, w][i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    run.backward(saved, [torch.ones_like(outputs[0])])
    return {op: end - start for _, op, _, _, _, start, end in session.timeline()}


def operands(kernel: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.bfloat16() if "bf16" in kernel else t for t in tensors]


def sessions_of(x: torch.Tensor, w: torch.Tensor, stride: int, pad: int, groups: int) -> dict[str, _C.Session]:
    """By kernel; those that decline are left out."""
    sessions = {}
    for kernel in KERNELS:
        others = {other for other in KERNELS if other != kernel} | {"ref"}
        _C.disable_kernels([f"{prefix}_{other}" for other in others
                            for prefix in ("conv", "conv_grad_input", "conv_grad_weight")])
        kind = onnx.TensorProto.BFLOAT16 if "bf16" in kernel else onnx.TensorProto.FLOAT
        session = session_of(tuple(x.shape), tuple(w.shape), stride, pad, groups, kind)
        try:
            step(session, *operands(kernel, x, w))
        except _C.UnsupportedError:
            continue
        finally:
            _C.disable_kernels([])
        sessions[kernel] = session
    return sessions


def main() -> None:
    _C.set_timing(True)
    names = "".join(f"{kernel.removeprefix('f32_'):>14}" for kernel in KERNELS)
    print(f"{'':<38}" + "".join(f"{part:>{len(names)}}" for part in PARTS) + f"\n{'':<38}" + names * len(PARTS))
    for name, xs, ws, stride, pad, groups in SHAPES:
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        x, w = torch.randn(xs), torch.randn(ws)
        sessions = sessions_of(x, w, stride, pad, groups)
        times: dict[str, list[dict[str, float]]] = {kernel: [] for kernel in sessions}
        for _ in range(15):
            for kernel, session in sessions.items():
                times[kernel].append(step(session, *operands(kernel, x, w)))
        line = ""
        for part in PARTS:
            first = 0.0
            for kernel in KERNELS:
                ms = 1e3 * statistics.median(t[part] for t in times[kernel]) if kernel in times else 0.0
                first = first or ms
                line += f"{ms:>8.2f}{ms / first:>6.2f}" if ms else f"{'-':>14}"
        print(f"{name:<38}{line}", flush=True)


if __name__ == "__main__":
    main()
