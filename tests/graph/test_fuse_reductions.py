"""Reductions of what elementwise nodes compute are part of their node; sums have the bits of the reductions' own."""

import random

import numpy as np
import onnx
import pytest
import torch
from harness import failing_allocations
from onnx import helper, numpy_helper
from test_fuse_elementwise import SEED, random_model, step

from onnxtrain import _C

CODE = {torch.float32: 1, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}
REDUCED = {"ReduceSum": lambda x, d, k: x.sum(d, keepdim=k), "ReduceMean": lambda x, d, k: x.mean(d, keepdim=k),
           "ReduceMax": lambda x, d, k: x.amax(d, keepdim=k),
           "ReduceSumSquare": lambda x, d, k: (x * x).sum(d, keepdim=k)}


@pytest.fixture(autouse=True)
def passes_as_they_were():
    yield
    _C.disable_passes([])
    _C.disable_kernels([])


def graph_of(nodes, inputs, outputs, dtype, axes=None):
    """`axes` are constants by name."""
    values = [helper.make_tensor_value_info(name, CODE[dtype], shape) for name, shape in inputs]
    constants = [numpy_helper.from_array(np.array(a, dtype=np.int64), name) for name, a in (axes or {}).items()]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name=name) for name in outputs], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def forward(model, tensors, seed=7):
    session = _C.Session(model)
    outputs, _ = session.forward(tensors, b"\0" * len(tensors), seed)
    return outputs, session.text("program")


def apart(model, tensors, name="fuse_reductions"):
    _C.disable_passes([name])
    try:
        outputs, text = forward(model, tensors)
    finally:
        _C.disable_passes([])
    assert "FusedReduce" not in text
    return outputs


def chain_then(op_type, shape, axes, keepdims, dtype, stored=False):
    """y = reduce(tanh(x * b) + x), b a row."""
    nodes = [helper.make_node("Mul", ["x", "b"], ["m"]), helper.make_node("Tanh", ["m"], ["t"]),
             helper.make_node("Add", ["t", "x"], ["a"]),
             helper.make_node(op_type, ["a", "axes"], ["y"], keepdims=keepdims)]
    return graph_of(nodes, [("x", shape), ("b", shape[-1:])], ["y", "a"] if stored else ["y"], dtype, {"axes": axes})


def close(got, exact, terms, apart):
    """The bits of the separate nodes; from the exact result no farther than a few roundings of the terms' magnitudes,
    reduced, are.
    """
    assert got.shape == exact.shape and torch.equal(got, apart)
    unit = {torch.float32: 2**-23, torch.float64: 2**-52}[got.dtype]
    if exact.numel():
        error, scale = (got.double() - exact).abs().max(), terms.abs().max()
        assert error <= 8 * unit * (scale + 1), (error, scale)


TAKEN = [
    ((40, 96), [1]), ((37, 641), [-1]), ((5, 1024), [1]), ((3, 1025), [1]), ((7, 5000), [1]), ((2, 65536), [1]),
    ((4, 9, 64), [2]), ((4, 6, 128), [1, 2]), ((300, 65), [1]), ((1, 70), [1]), ((2, 3, 5, 100), [-1]),
    ((40, 96), [0]), ((37, 641), [0]), ((32, 5000), [0]), ((2000, 64), [0]), ((4, 9, 64), [0, 1]), ((900, 70), [0]),
    ((33, 20000), [0]), ((1, 40, 80), [1]), ((3, 40, 128), [0, 1]),
    ((40, 96), [0, 1]), ((70,), [0]), ((3, 50, 700), [0, 1, 2]), ((123457,), [0]), ((1, 1, 64), [0, 1, 2]),
    ((16385, 64), [0, 1]),
]
LEFT = [((40, 20), [1]), ((31, 96), [0]), ((40, 9, 64), [1]), ((4, 9, 5, 64), [1, 3]), ((2, 65537), [1]),
        ((4, 1, 96), [1]), ((0, 64), [0]), ((5, 0), [0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op_type", REDUCED)
@pytest.mark.parametrize("shape, axes", TAKEN, ids=str)
def test_layouts(shape, axes, op_type, dtype):
    columns = (len(shape) - 1) % len(shape) not in [a % len(shape) for a in axes]
    taken = op_type in ("ReduceSum", "ReduceMean") or (dtype == torch.float32 and not columns)
    x, b = drawn(*shape, dtype=dtype, seed=1), drawn(shape[-1], dtype=dtype, seed=2)
    exact = (x.double() * b.double()).tanh() + x.double()
    for keepdims in (0, 1):
        for stored in (False, True):
            model = chain_then(op_type, shape, axes, keepdims, dtype, stored)
            got, text = forward(model, [x, b])
            gains = not stored or columns or got[0].numel() == 1
            assert ("FusedReduce" in text) == (taken and gains), text
            others = apart(model, [x, b])
            assert all(map(torch.equal, got, others))
            want, terms = (REDUCED[op_type](t, axes, bool(keepdims)) for t in (exact, exact.abs()))
            if taken:
                close(got[0], want, terms, others[0])


@pytest.mark.parametrize("shape, axes", LEFT, ids=str)
def test_what_stays_apart(shape, axes):
    """Rows and columns that are short, few or too long, axes apart from each other, and nothing at all."""
    x, b = drawn(*shape, seed=1), drawn(shape[-1], seed=2)
    got, text = forward(chain_then("ReduceSum", shape, axes, 1, torch.float32), [x, b])
    assert "FusedReduce" not in text
    exact = ((x.double() * b.double()).tanh() + x.double()).sum(axes, keepdim=True)
    torch.testing.assert_close(got[0].double(), exact, rtol=1e-5, atol=1e-4)


def test_large_rows_that_are_stored():
    """Beyond the caches, sums of rows are joined with what is stored as well."""
    for rows, joined in ((8191, False), (8192, True)):
        x, b = drawn(rows, 512, seed=1), drawn(512, seed=2)
        model = chain_then("ReduceSum", (rows, 512), [1], 0, torch.float32, True)
        got, text = forward(model, [x, b])
        assert ("FusedReduce" in text) == joined
        exact = ((x.double() * b.double()).tanh() + x.double()).sum(1)
        torch.testing.assert_close(got[0].double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("op_type", REDUCED)
@pytest.mark.parametrize("axes", [[0], [1], [0, 1]], ids=str)
def test_no_number(axes, op_type, value):
    x = drawn(50, 3000, seed=3)
    x[7, 2000] = value
    model = graph_of([helper.make_node("Neg", ["x"], ["n"]), helper.make_node(op_type, ["n", "axes"], ["y"])],
                     [("x", (50, 3000))], ["y"], torch.float32, {"axes": axes})
    got, _ = forward(model, [x])
    torch.testing.assert_close(got[0], REDUCED[op_type](-x, axes, True), equal_nan=True, rtol=1e-4, atol=1e-3)


def many(dtype=torch.float32):
    """Rows, columns and the whole of two results of one group, of which one is an output as well."""
    nodes = [helper.make_node("Mul", ["x", "b"], ["m"]), helper.make_node("Tanh", ["m"], ["t"]),
             helper.make_node("Sub", ["t", "x"], ["d"]), helper.make_node("Mul", ["d", "d"], ["q"]),
             helper.make_node("ReduceSum", ["d", "first"], ["columns"], keepdims=0),
             helper.make_node("ReduceMean", ["q", "last"], ["rows"], keepdims=1),
             helper.make_node("ReduceMean", ["q", "both"], ["whole"], keepdims=0)]
    return graph_of(nodes, [("x", (600, 130)), ("b", (130,))], ["columns", "rows", "whole", "d"], dtype,
                    {"first": [0], "last": [1], "both": [0, 1]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_several_of_one_group(dtype):
    x, b = drawn(600, 130, dtype=dtype, seed=1), drawn(130, dtype=dtype, seed=2)
    got, text = forward(many(dtype), [x, b])
    assert text.count("FusedReduce") == 1 and "= Reduce" not in text
    assert "Mul Tanh Sub Mul" in text
    others = apart(many(dtype), [x, b])
    d = (x.double() * b.double()).tanh() - x.double()
    rows, whole = (d * d).mean(1, keepdim=True), (d * d).mean()
    for y, other, exact, terms in zip(got, others, (d.sum(0), rows, whole, d), (d.abs().sum(0), rows, whole, d),
                                      strict=True):
        close(y, exact, terms, other)


def test_disabled_by_either_name():
    x, b = drawn(600, 130, seed=1), drawn(130, seed=2)
    assert len(apart(many(), [x, b])) == 4
    _C.disable_passes(["fuse_elementwise"])
    text = forward(many(), [x, b])[1]
    assert "FusedReduce" not in text and "FusedElementwise" not in text


def test_dropped_elements_are_the_same():
    nodes = [helper.make_node("Constant", [], ["ratio"], value_float=0.4),
             helper.make_node("Constant", [], ["training"], value=helper.make_tensor("t", 9, [], [True])),
             helper.make_node("Dropout", ["x", "ratio", "training"], ["d"]), helper.make_node("Mul", ["d", "b"], ["m"]),
             helper.make_node("ReduceSum", ["m", "axes"], ["y"])]
    for axes in ([0], [1], [0, 1]):
        model = graph_of(nodes, [("x", (333, 77)), ("b", (77,))], ["y", "d"], torch.float32, {"axes": axes})
        x, b = drawn(333, 77, seed=1), drawn(77, seed=2)
        got, text = forward(model, [x, b])
        assert "Dropout Mul ReduceSum" in text
        others = apart(model, [x, b])
        assert torch.equal(got[1], others[1]) and 0.3 < (got[1] == 0).double().mean() < 0.5
        torch.testing.assert_close(got[0].double(), (got[1].double() * b.double()).sum(axes, keepdim=True), rtol=1e-5,
                                   atol=1e-4)


def test_loss_and_bias_gradients():
    """mean((gelu(x w + b) * g - y)^2): the loss, and the sums that gradients of b and g are."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["a"]),
             helper.make_node("Gelu", ["a"], ["u"]), helper.make_node("Mul", ["u", "g"], ["s"]),
             helper.make_node("Sub", ["s", "y"], ["d"]), helper.make_node("Mul", ["d", "d"], ["q"]),
             helper.make_node("ReduceMean", ["q"], ["loss"], keepdims=0)]
    shapes = {"x": (90, 40), "w": (40, 72), "b": (72,), "g": (72,), "y": (90, 72)}
    tensors = [drawn(*shape, seed=k) * 0.5 for k, shape in enumerate(shapes.values())]
    model = graph_of(nodes, list(shapes.items()), ["loss"], torch.float32)
    got, text = step(model, tensors)
    ahead, behind = text.split("# backward")
    assert "ReduceMean" in ahead and "= Reduce" not in text and "SumTo" in behind and "= ai.onnxtrain.SumTo" not in text
    x, w, b, g, y = wide = [t.double().requires_grad_() for t in tensors]
    loss = ((torch.nn.functional.gelu(x @ w + b) * g - y) ** 2).mean()
    (loss * 0.5).backward()
    for have, want in zip(got, [loss.detach(), *(t.grad for t in wide)], strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-6)


def test_not_across_the_split():
    """What backward alone reduces is not summed in forward: y's gradient needs the sum of an activation's square."""
    nodes = [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Mul", ["t", "c"], ["y"])]
    model = graph_of(nodes, [("x", (200, 96)), ("c", (1,))], ["y"], torch.float32)
    x, c = drawn(200, 96, seed=1), drawn(1, seed=2)
    got, text = step(model, [x, c])
    ahead, behind = text.split("# backward")
    assert "FusedReduce" not in ahead and "FusedReduce" in behind
    want = (0.5 * x.double().tanh()).sum()
    torch.testing.assert_close(got[2].double(), want.reshape(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("viewed", [False, True], ids=["for sums", "for others too"])
def test_through_views(viewed):
    """A bias gradient sums what a Reshape sees; the view goes with its last reader."""
    nodes = [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Reshape", ["t", "flat"], ["f"]),
             helper.make_node("Reshape", ["f", "deep"], ["g"]), helper.make_node("ReduceSum", ["f", "first"], ["s"]),
             helper.make_node("ReduceMean", ["g", "last"], ["m"]), helper.make_node("MatMul", ["f", "w"], ["p"])]
    outputs = ["s", "m", "p"] if viewed else ["s", "m"]
    model = graph_of(nodes[:len(nodes) - (not viewed)], [("x", (8, 50, 96)), ("w", (96, 3))], outputs, torch.float32,
                     {"flat": [400, 96], "deep": [2, 200, 96], "first": [0], "last": [2]})
    x, w = drawn(8, 50, 96, seed=1), drawn(96, 3, seed=2)
    got, text = forward(model, [x, w])
    assert "Tanh ReduceSum ReduceMean" in text or "Tanh ReduceMean ReduceSum" in text, text
    assert text.count("= Reshape") == viewed
    t = x.double().tanh().reshape(400, 96)
    for y, want in zip(got, (t.sum(0, keepdim=True), t.reshape(2, 200, 96).mean(2, keepdim=True), t @ w.double())):
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", range(40))
def test_random_graphs(number):
    """Groups of all sorts with reductions among them, and gradients of broadcast operands, forward and backward."""
    rng = random.Random(SEED + 1000 + number)
    print(f"ONNXTRAIN_TEST_SEED={SEED} graph {number}")
    model, names = random_model(rng)
    generator = torch.Generator().manual_seed(SEED + number)
    tensors = [torch.randn(shape, generator=generator) * (0.1 if name == "w" else 1) for name, shape in names]
    _C.disable_passes(["fuse_reductions"])
    want, plain = step(model, tensors)
    _C.disable_passes([])
    got, _ = step(model, tensors)
    assert "FusedReduce" not in plain
    for a, b in zip(want, got, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def test_failing_allocations():
    x, b = drawn(600, 130, seed=1), drawn(130, seed=2)
    want = forward(many(), [x, b])[0]
    got = failing_allocations(lambda: forward(many(), [x, b])[0])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
