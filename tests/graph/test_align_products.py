"""GEMMs in 16 bits whose rows are padded to 16 bytes: the pass of devices, on the CPU, where it runs only when asked
for.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest
import torch

from onnxtrain import _C

HEAD = '<ir_version: 10, opset_import: ["" : 20]> '
MATMUL = HEAD + """g (TYPE[2, 256, 128] x, TYPE[128, N] w) => (TYPE[2, 256, N] z) {
    y = MatMul(x, w)  z = Tanh(y) }"""
TRANSPOSED = HEAD + """g (TYPE[512, 128] x, TYPE[N, 128] w) => (TYPE[512, N] z) {
    v = Transpose <perm = [1, 0]> (w)  y = MatMul(x, v)  z = Tanh(y) }"""
GEMM = HEAD + """g (TYPE[512, 128] x, TYPE[N, 128] w, TYPE[N] b) => (TYPE[512, N] z) {
    y = Gemm <transB = 1, alpha = 0.5> (x, w, b)  z = Tanh(y) }"""
ODD = 4101


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    _C.set_timing(False)
    _C.disable_passes([])


def step(text: str, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Output and gradients, and the shapes that GEMMs saw."""
    session = _C.Session(onnx.parser.parse_model(text).SerializeToString())
    _C.set_timing(True)
    outputs, run = session.forward(tensors, bytes([1] * len(tensors)))
    torch.manual_seed(5)
    grad = torch.randn(outputs[0].shape).to(outputs[0].dtype)
    grads = run.backward([tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs], [grad])
    shapes = " ".join(shape for _, op, _, shape, *_ in session.timeline() if op in ("MatMul", "FusedMatMul", "Gemm"))
    return [outputs[0], *grads], shapes


@pytest.mark.parametrize("text", [MATMUL, TRANSPOSED, GEMM], ids=["matmul", "transposed", "gemm"])
@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_padded_rows(text, dtype, name):
    text = text.replace("TYPE", name).replace("N]", f"{ODD}]").replace("[N,", f"[{ODD},")
    model = onnx.parser.parse_model(text)
    torch.manual_seed(0)
    tensors = [(torch.randn([d.dim_value for d in i.type.tensor_type.shape.dim]) / 8).to(dtype)
               for i in model.graph.input]
    want, plain = step(text, tensors)
    assert str(ODD) in plain
    _C.disable_passes(["+align_products"])
    got, padded = step(text, tensors)
    assert str(ODD + 3) in padded and str(ODD) not in padded, padded
    for a, b in zip(want, got, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2 * a.float().abs().max().item())
