"""GELU in products: the pass, and the plain kernels that devices' are held against, on the CPU,
where it runs only when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest
import torch

from onnxtrain import _C

MODEL = """<ir_version: 10, opset_import: ["" : 20]> g (TYPE[DIMS12] x, TYPE[12, 16] w, TYPE[16] b, TYPE[16, 7] v) => (TYPE[DIMS7] z) {
    p = MatMul(x, w)  y = Add(p, b)  h = Gelu <approximate = "tanh"> (y)  z = MatMul(h, v) }"""
GEMM = """<ir_version: 10, opset_import: ["" : 20]> g (TYPE[9, 12] x, TYPE[16, 12] w, TYPE[16] b, TYPE[7, 16] v) => (TYPE[9, 7] z) {
    y = Gemm <transB = 1> (x, w, b)  h = Gelu <approximate = "tanh"> (y)  z = Gemm <transB = 1> (h, v) }"""


@pytest.fixture(autouse=True)
def asked() -> Iterator[None]:
    _C.disable_passes(["+fuse_gelu"])
    yield
    _C.disable_passes([])


def step(text: str, tensors: list[torch.Tensor], mask: bytes) -> tuple[list[torch.Tensor], set[str]]:
    """Output and gradients, and the operators that ran."""
    session = _C.Session(onnx.parser.parse_model(text).SerializeToString())
    _C.set_timing(True)
    outputs, run = session.forward(tensors, mask)
    grads: tuple = ()
    if run is not None:
        torch.manual_seed(5)
        grad = torch.randn(outputs[0].shape).to(outputs[0].dtype)
        grads = run.backward([tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs], [grad])
    _C.set_timing(False)
    return [outputs[0], *(g for g in grads if g is not None)], {(op, kernel)
                                                                for _, op, kernel, *_ in session.timeline()}


@pytest.mark.parametrize("text", [MODEL.replace("DIMS", "9, "), MODEL.replace("DIMS", "2, 4, "), GEMM],
                         ids=["matmul", "batch", "gemm"])
@pytest.mark.parametrize("dtype, name, tol", [(torch.float32, "float", 1e-5), (torch.float64, "double", 1e-12)])
@pytest.mark.parametrize("mask", [b"\0\0\0\0", b"\1\1\1\1", b"\1\0\0\0", b"\0\0\1\0", b"\0\1\0\1"],
                         ids=lambda m: m.hex())
def test_as_apart(text, dtype, name, tol, mask):
    torch.manual_seed(0)
    model = onnx.parser.parse_model(text.replace("TYPE", name))
    tensors = [torch.randn([d.dim_value for d in i.type.tensor_type.shape.dim], dtype=torch.float64).to(dtype) / 2
               for i in model.graph.input]
    got, used = step(text.replace("TYPE", name), tensors, mask)
    assert ("GeluMatMul", "gelu_matmul_ref") in used and not any(op == "Gelu" for op, _ in used), used
    backward = {op for op, _ in used if op in ("GeluMatMulGrad", "GeluGrad")}
    assert backward == (set() if mask in (b"\0\0\0\0",) else {"GeluMatMulGrad"}), used
    _C.disable_passes([])
    want, apart = step(text.replace("TYPE", name), tensors, mask)
    assert not any(op.startswith("GeluMatMul") for op, _ in apart), apart
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def test_the_other_form_stays_apart():
    _, used = step(GEMM.replace("TYPE", "float").replace("tanh", "none"),
                   [torch.randn(s) for s in ((9, 12), (16, 12), (16,), (7, 16))], bytes(4))
    assert not any(op.startswith("GeluMatMul") for op, _ in used), used
