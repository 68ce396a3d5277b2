"""Normalization with additions around it: the pass on the CPU, where it runs only when asked for. Casts to 16 bits are
joined where a device has kernels for that; tests/cuda/rows.py has those.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest
import torch

from onnxtrain import _C

HEADER = '<ir_version: 10, opset_import: ["" : 20]> '
X, W = "float[3, 5, 24]", "float[24]"
MODELS = {
    # the sum is read again, and its gradient has a second part
    "pre": (f"g ({X} x, {X} a, {W} w, {W} b) => ({X} z, {X} s)"
            "{ s = Add(x, a)  y = LayerNormalization(s, w, b)  z = Tanh(y) }",
            ["s = x + a", "addend to dx"]),
    # the result is read twice, and its gradient has two parts
    "post": (f"g ({X} x, {X} a, {W} w, {W} b) => ({X} z, {X} u)"
             "{ s = Add(x, a)  y = LayerNormalization(s, w, b)  z = Tanh(y)  u = Exp(y) }", ["s = x + a", "dy2"]),
    "two norms of one sum": (f"g ({X} x, {X} a, {W} w, {W} b) => ({X} z, {X} u)"
                             "{ s = Add(x, a)  z = LayerNormalization(s, w, b)  u = LayerNormalization(s, b, w) }",
                             ["s = x + a", "addend to dx"]),
    "used before": (f"g ({X} x, {X} a, {W} w, {W} b) => ({X} z, {X} u)"
                    "{ s = Add(x, a)  u = Tanh(s)  v = LayerNormalization(u, w, b)  z0 = LayerNormalization(s, w, b)"
                    "  z = Mul(z0, v) }", ["addend to dx"]),
    "broadcast": (f"g ({X} x, {W} a, {W} w, {W} b) => ({X} z)"
                  "{ s = Add(x, a)  z = LayerNormalization(s, w, b) }", []),
    "twice the same": (f"g ({X} x, {W} w, {W} b) => ({X} z)"
                       "{ s = Add(x, x)  z = LayerNormalization(s, w, b) }", []),
    "two axes": ("g (float[3, 5, 24] x, float[3, 5, 24] a, float[5, 24] w) => (float[3, 5, 24] z)"
                 "{ s = Add(x, a)  z = LayerNormalization <axis = 1, epsilon = 0.1> (s, w) }", ["s = x + a"]),
}


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    yield
    _C.disable_passes([])


def step(text: str, tensors: list[torch.Tensor], mask: bytes) -> tuple[list[torch.Tensor], str]:
    session = _C.Session(onnx.parser.parse_model(text).SerializeToString())
    outputs, run = session.forward(tensors, mask)
    grads: tuple = ()
    if run is not None:
        torch.manual_seed(5)
        given = [torch.randn(o.shape, dtype=torch.float64).to(o.dtype) for o in outputs]
        grads = run.backward([tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs], given)
    return [*outputs, *(g for g in grads if g is not None)], session.text("program")


def operands(program: str, op: str) -> list[list[str]]:
    """Of each node of the operator, the inputs by place; an absent one is empty."""
    return [[name.strip() for name in line.rsplit("(", 1)[1].rstrip(") ").split(",")]
            for line in program.splitlines() if f"{op} " in line]


def joined(program: str) -> set[str]:
    """Which additions are operands of a norm."""
    forward, backward = operands(program, "FusedNorm"), operands(program, "FusedNormGrad")
    return ({"s = x + a" for i in forward if len(i) > 3 and i[3]}
            | {"dy2" for i in backward if len(i) > 5 and i[5]}
            | {"addend to dx" for i in backward if len(i) > 6 and i[6]})


@pytest.mark.parametrize("dtype, tol", [("float", 2e-5), ("double", 1e-12)])
@pytest.mark.parametrize("name", MODELS)
def test_as_apart(name, dtype, tol):
    text, expected = MODELS[name]
    model = HEADER + text.replace("float", dtype)
    torch.manual_seed(1)
    shapes = [[d.dim_value for d in i.type.tensor_type.shape.dim]
              for i in onnx.parser.parse_model(model).graph.input]
    tensors = [torch.randn(s, dtype=torch.float64).to(torch.float32 if dtype == "float" else torch.float64)
               for s in shapes]
    for mask in (bytes(len(tensors)), b"\1" * len(tensors), b"\0" * (len(tensors) - 1) + b"\1"):
        _C.disable_passes(["+fuse_norm"])
        got, program = step(model, tensors, mask)
        assert "FusedNorm " in program and "LayerNorm" not in program, program
        if mask[0]:
            assert joined(program) == set(expected), program
        _C.disable_passes([])
        want, apart = step(model, tensors, mask)
        assert "FusedNorm" not in apart and len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def test_casts_stay_where_no_kernel_takes_them():
    _C.disable_passes(["+fuse_norm"])
    model = HEADER + ("g (float[4, 8] x, float[8] w, float[8] b) => (bfloat16[4, 8] z)"
                      "{ y = LayerNormalization(x, w, b)  z = Cast <to = 16> (y) }")
    x, w, b = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    got, program = step(model, [x, w, b], b"\1\1\1")
    assert "FusedNorm " in program and program.count("Cast") == 2, program
    torch.testing.assert_close(got[0], torch.nn.functional.layer_norm(x, (8,), w, b).bfloat16(), rtol=0.01, atol=0.01)
