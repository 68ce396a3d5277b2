"""Quantization in training and quantized products, on a device against the CPU; for programs.py."""

from __future__ import annotations

import onnx
import torch
from checks import exported
from compare import agree
from torch import nn

QUANTIZED = """<ir_version: 10, opset_import: ["" : 20]> g (TYPE[6, 8] x, TYPE[8, 5] w, TYPE s, TYPE[5] t, float[6, 8] f)
    => (y, i, c, p) <int8 zero = {3}, int8[5] zeros = {0, 1, 2, -3, 4}> {
    a = QuantizeLinear(x, s, zero)  b = DequantizeLinear(a, s, zero)
    d = QuantizeLinear <axis = 1> (w, t, zeros)  e = DequantizeLinear <axis = 1> (d, t, zeros)
    y = MatMul(b, e)  q, c, r = DynamicQuantizeLinear(f)  m = MatMulInteger(q, d, r)
    i = Cast <to = 1> (m)  p = Cast <to = 1> (r) }"""


class Quantized(nn.Module):
    """Layers whose weights and activations are quantized in training, as by torch.ao's FakeQuantize."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((12, 16), (16, 10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            scale, zero = torch.linspace(0.001, 0.003, len(layer.weight)), torch.zeros(len(layer.weight), dtype=torch.int32)
            weight = torch.fake_quantize_per_channel_affine(layer.weight, scale, zero, 0, -128, 127)
            x = nn.functional.linear(torch.fake_quantize_per_tensor_affine(x, 0.04, 12, 0, 255), weight, layer.bias)
        return x


def quantized(device: str) -> set[str]:
    """Fake quantization of one tensor and along an axis, with the gradients of the scales, and quantized products."""
    torch.manual_seed(0)
    used = agree(device, *exported(Quantized(), (torch.randn(9, 12) * 3,)))
    for name, dtype, tol in (("float", torch.float32, 2e-5), ("double", torch.float64, 1e-10),
                             ("float16", torch.float16, 4e-3), ("bfloat16", torch.bfloat16, 3e-2)):
        torch.manual_seed(0)
        tensors = [torch.randn(6, 8) * 3, torch.randn(8, 5), torch.tensor(0.031), torch.rand(5) / 40 + 0.005]
        model = onnx.parser.parse_model(QUANTIZED.replace("TYPE", name)).SerializeToString()
        used |= agree(device, model, [*(t.to(dtype) for t in tensors), torch.randn(6, 8)], tol, mask=b"\1\1\1\1\0")
    assert "QuantizeLinear:cuda_quantize" in used, used
    return used
