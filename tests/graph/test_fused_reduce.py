"""Kernels of FusedReduce agree on any number of threads, and over the memory of an operand."""

import onnx
import pytest
import torch
from onnx import helper
from test_fuse_reductions import (  # noqa: F401
    REDUCED,
    apart,
    chain_then,
    drawn,
    forward,
    graph_of,
    many,
    passes_as_they_were,
)

from onnxtrain import _C


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_do_not_matter(dtype):
    x, b = drawn(600, 130, dtype=dtype, seed=1), drawn(130, dtype=dtype, seed=2)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(threads)
            results.append(forward(many(dtype), [x, b])[0])
            results[-1] += forward(chain_then("ReduceSum", (9, 5000), [1], 1, dtype), [
                drawn(9, 5000, dtype=dtype, seed=4), drawn(5000, dtype=dtype, seed=5)])[0]
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("stored", [False, True], ids=["reduced", "stored"])
def test_kernels_agree(stored):
    x, b = drawn(300, 700, seed=1), drawn(700, seed=2)
    model = chain_then("ReduceMean", (300, 700), [0], 0, torch.float32, stored)
    first = forward(model, [x, b])[0]
    names = ["fused_reduce_over", "fused_reduce", "fused_reduce_ref"]
    for kernel in names[not stored:]:
        _C.disable_kernels([f"FusedReduce:{n}" for n in names if n != kernel])
        session = _C.Session(model)
        got, _ = session.forward([x, b], b"\0\0")
        assert kernel in [k for _, k, _ in session.kernels()]
        for y, want in zip(got, first, strict=True):
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, half", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=["bf16", "f16"])
@pytest.mark.parametrize("axes", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean"])
def test_16_bits(op_type, axes, dtype, half):
    """Elements are rounded as the separate nodes round them, their sum is float32 and rounded once."""
    x, b = drawn(300, 1300, dtype=dtype, seed=1), drawn(1300, dtype=dtype, seed=2)
    model = chain_then(op_type, (300, 1300), axes, 1, dtype, True)
    (y, a), text = forward(model, [x, b])
    assert "FusedReduce" in text and "= Reduce" not in text, text
    others = apart(model, [x, b])
    assert torch.equal(a, others[1])
    exact = REDUCED[op_type](a.double(), axes, True)
    assert torch.all((y.double() - exact).abs() <= half * exact.abs() + 1e-4 * exact.abs().max())
    y, text = forward(chain_then(op_type, (300, 1300), axes, 1, dtype), [x, b])
    assert torch.all((y[0].double() - exact).abs() <= half * exact.abs() + 1e-4 * exact.abs().max())


def test_result_over_an_operand():
    """The group's result takes the place of an operand that it was computed from, tile by tile."""
    nodes = [helper.make_node("Softmax", ["x"], ["e"]), helper.make_node("Mul", ["e", "b"], ["m"]),
             helper.make_node("Add", ["m", "e"], ["y"]), helper.make_node("ReduceSum", ["m", "axes"], ["s"]),
             helper.make_node("ReduceSum", ["y", "last"], ["r"])]
    model = graph_of(nodes, [("x", (400, 96)), ("b", (96,))], ["y", "s", "r"], torch.float32,
                     {"axes": [0], "last": [1]})
    x, b = drawn(400, 96, seed=1), drawn(96, seed=2)
    session = _C.Session(model)
    (y, s, r), _ = session.forward([x, b], b"\0\0")
    assert "fused_reduce_over" in [k for _, k, _ in session.kernels()]
    e = x.double().softmax(1)
    for got, want in ((y, e * b + e), (s, (e * b).sum(0, keepdim=True)), (r, (e * b + e).sum(1, keepdim=True))):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_small_result_in_no_operands_place():
    """Operands of one element a row, as many as there are row sums, are read until the last row is done."""
    nodes = [helper.make_node("Softmax", ["c"], ["p"], axis=0), helper.make_node("Mul", ["x", "p"], ["m"]),
             helper.make_node("Tanh", ["m"], ["t"]), helper.make_node("ReduceSum", ["t", "axes"], ["y"])]
    model = graph_of(nodes, [("x", (500, 128)), ("c", (500, 1))], ["y"], torch.float32, {"axes": [1]})
    x, c = drawn(500, 128, seed=1), drawn(500, 1, seed=2)
    got, text = forward(model, [x, c])
    assert "Mul Tanh ReduceSum" in text
    exact = (x.double() * c.double().softmax(0)).tanh().sum(1, keepdim=True)
    torch.testing.assert_close(got[0].double(), exact, rtol=1e-5, atol=1e-6)


def test_a_model_cannot_bring_reductions_of_its_own():
    node = helper.make_node("FusedReduce", ["x"], ["y"], domain="ai.onnxtrain", steps=[0, 0, 1, 1, 0, 0, 0, 0],
                            parameters=[0.0, 0.0], results=[0], sinks=[99], reductions=[0, 0, 1, 1, 0])
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (4,))],
                              [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20),
                                                    helper.make_opsetid("ai.onnxtrain", 1)], ir_version=10)
    with pytest.raises(ValueError, match="is an internal operator, which a model cannot use"):
        _C.Session(model.SerializeToString())
