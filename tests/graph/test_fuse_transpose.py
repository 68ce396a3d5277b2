"""Transposes that feed matrix products become their flags, forward and backward; others stay."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from onnxtrain import _C


def session_of(op_type, a, b, perm_a=None, perm_b=None, **attrs):
    """One product whose operands are transposed where a perm is given; () is a Transpose without perm."""
    nodes, names = [], []
    for name, perm in (("a", perm_a), ("b", perm_b)):
        if perm is not None:
            nodes.append(helper.make_node("Transpose", [name], [name + "t"], **({"perm": perm} if perm else {})))
        names.append(name if perm is None else name + "t")
    nodes.append(helper.make_node(op_type, names, ["y"], **attrs))
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, x.shape) for n, x in (("a", a), ("b", b))]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name="y")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())


def step(session, a, b, dy):
    """Result, gradients, and the text of the program."""
    y, run = session.forward([a, b], b"\1\1")
    saved = [[a, b][i] for i in run.saved_inputs] + [y[i] for i in run.saved_outputs]
    return (y[0], *run.backward(saved, [dy])), session.text("program")


ABSORBED = [
    ("MatMul", (5, 4), (6, 4), None, (1, 0), {}),
    ("MatMul", (5, 4), (6, 4), None, (), {}),
    ("MatMul", (4, 5), (4, 6), (1, 0), None, {}),
    ("MatMul", (4, 5), (6, 4), (1, 0), (1, 0), {}),
    ("MatMul", (2, 3, 5, 4), (2, 3, 6, 4), None, (0, 1, 3, 2), {}),
    ("MatMul", (2, 3, 5, 4), (6, 4), None, (1, 0), {}),
    ("Gemm", (4, 5), (6, 4), (1, 0), (1, 0), {"alpha": 0.5}),
    ("Gemm", (4, 5), (4, 6), None, (1, 0), {"transA": 1, "transB": 1}),
]
KEPT = [
    ("MatMul", (2, 5, 4), (4, 2, 6), None, (1, 0, 2), {}),
    ("MatMul", (2, 5, 4), (6, 4, 2), None, (), {}),
    ("MatMul", (5, 3, 4), (6, 4), (1, 0, 2), (1, 0), {}),
]


def check(case):
    op_type, a, b, perm_a, perm_b, attrs = case
    a, b = (torch.from_numpy(np.random.default_rng(i).normal(size=s)).requires_grad_() for i, s in enumerate((a, b)))
    permute = lambda x, p: x if p is None else x.permute(p or tuple(reversed(range(x.dim()))))  # noqa: E731
    ta, tb = permute(a, perm_a), permute(b, perm_b)
    y = attrs.get("alpha", 1) * ((ta.mT if attrs.get("transA") else ta) @ (tb.mT if attrs.get("transB") else tb))
    dy = torch.from_numpy(np.random.default_rng(2).normal(size=tuple(y.shape)))
    expected = (y, *torch.autograd.grad(y, (a, b), dy))
    actual, text = step(session_of(op_type, a, b, perm_a, perm_b, **attrs), a.detach(), b.detach(), dy)
    for got, want in zip(actual, expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    return text


@pytest.mark.parametrize("case", ABSORBED, ids=str)
def test_absorbed(case):
    assert "Transpose" not in check(case)


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_kept(case):
    assert "Transpose" in check(case)
