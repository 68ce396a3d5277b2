"""Milliseconds of each convolution kernel, forward and both gradients, in interleaved rounds: python tests/bench/conv.py

The shapes are those of the CNN and ResNet-18 workloads, of a depthwise block and of a 1-d and a 3-d network. A program
takes the first kernel that accepts, which is oneDNN's: this table is why.
"""

from __future__ import annotations

import statistics

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
    ("ResNet down, 1x1", (32, 64, 32, 32), (128, 64, 1, 1), 2, 0, 1),
    ("pointwise", (32, 128, 16, 16), (256, 128, 1, 1), 1, 0, 1),
    ("depthwise", (32, 128, 16, 16), (128, 1, 3, 3), 1, 1, 128),
    ("7x7, three channels", (8, 3, 112, 112), (64, 3, 7, 7), 2, 3, 1),
    ("1-d", (16, 64, 512), (64, 64, 5), 1, 2, 1),
    ("3-d", (4, 16, 16, 16, 16), (32, 16, 3, 3, 3), 1, 1, 1),
]
KERNELS = ("f32_onednn", "gemm")
PARTS = ("Conv", "ConvGradInput", "ConvGradWeight")


def session_of(x: tuple[int, ...], w: tuple[int, ...], stride: int, pad: int, groups: int) -> _C.Session:
    rank = len(x) - 2
    node = helper.make_node("Conv", ["x", "w"], ["y"], strides=[stride] * rank, pads=[pad] * 2 * rank, group=groups)
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in (("x", x), ("w", w))]
    graph = helper.make_graph([node], "conv", inputs, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return _C.Session(model.SerializeToString())


def step(session: _C.Session, x: torch.Tensor, w: torch.Tensor) -> dict[str, float]:
    """Seconds of each part."""
    outputs, run = session.forward([x, w], b"\1\1")
    saved = [[x, w][i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    run.backward(saved, [torch.ones_like(outputs[0])])
    return {op: end - start for _, op, _, _, _, start, end in session.timeline()}


def main() -> None:
    _C.set_timing(True)
    print(f"{'':<24}" + "".join(f"{part:>26}" for part in PARTS) + "\n" + " " * 24 + f"{'onednn    gemm   ratio':>26}" * 3)
    for name, xs, ws, stride, pad, groups in SHAPES:
        x, w = torch.randn(xs), torch.randn(ws)
        sessions = {}
        for kernel in KERNELS:
            others = {other for other in KERNELS if other != kernel}
            _C.disable_kernels([f"{prefix}_{other}" for other in others for prefix in ("conv", "conv_grad_input", "conv_grad_weight")])
            sessions[kernel] = session_of(xs, ws, stride, pad, groups)
            step(sessions[kernel], x, w)
        _C.disable_kernels([])
        times: dict[str, list[dict[str, float]]] = {kernel: [] for kernel in sessions}
        for _ in range(15):
            for kernel, session in sessions.items():
                times[kernel].append(step(session, x, w))
        line = ""
        for part in PARTS:
            a, b = (1e3 * statistics.median(t[part] for t in times[kernel]) for kernel in KERNELS)
            line += f"{a:>10.2f}{b:>8.2f}{b / a:>8.2f}"
        print(f"{name:<24}{line}", flush=True)


if __name__ == "__main__":
    main()
