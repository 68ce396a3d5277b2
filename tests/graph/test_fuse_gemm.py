"""A row added to a product, and a Cast of a 16-bit product to float32, become part of the product;
other readers keep them apart.
"""

import numpy as np
import onnx
import pytest
import torch
from harness import HALF_KERNELS
from onnx import helper

from onnxtrain import _C

ELEM = {torch.float32: 1, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def session_of(nodes, inputs, outputs=("y",)):
    """inputs: name -> tensor."""
    infos = [helper.make_tensor_value_info(n, ELEM[x.dtype], x.shape) for n, x in inputs.items()]
    shape = onnx.numpy_helper.from_array(np.array([-1], dtype=np.int64), "flat")
    graph = helper.make_graph(nodes, "g", infos, [onnx.ValueInfoProto(name=o) for o in outputs], [shape])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)]
    return _C.Session(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def step(session, tensors, dys):
    """Outputs, gradients of all inputs, and the text of the program."""
    ys, run = session.forward(tensors, b"\1" * len(tensors))
    saved = [tensors[i] for i in run.saved_inputs] + [ys[i] for i in run.saved_outputs]
    return [*ys, *run.backward(saved, dys)], session.text("program")


def random(*shape, dtype, seed):
    values = np.random.default_rng(seed).uniform(-1, 1, shape)
    return torch.from_numpy(values).to(torch.bfloat16 if dtype.itemsize == 2 else dtype).to(dtype)


def assert_near(got, want, dtype, what):
    want = want.to(torch.float64)
    scale = want.abs().max().item() + 1e-30
    assert (got.to(torch.float64) - want).abs().max().item() <= TOLERANCE[dtype] * scale, what


@pytest.fixture(params=[True, False], ids=["kernels", "widened"])
def kernels(request):
    """With the products of 16-bit floats, where the processor has them, and without."""
    _C.disable_kernels([] if request.param else HALF_KERNELS)
    yield request.param
    _C.disable_kernels([])


# a, b, transA, transB
SHAPES = [
    ((7, 33), (33, 40), 0, 0), ((7, 33), (40, 33), 0, 1), ((33, 7), (33, 40), 1, 0), ((33, 7), (40, 33), 1, 1),
    ((2, 3, 130), (130, 257), 0, 0), ((2, 3, 130), (257, 130), 0, 1), ((2, 130, 5), (2, 130, 66), 1, 0),
    ((3, 1, 17, 8), (5, 8, 9), 0, 0), ((1, 64), (64, 48), 0, 0), ((200, 96), (96, 1), 0, 0),
]


def reference(a, b, ta, tb, row):
    a, b, row = (x.to(torch.float64).requires_grad_() for x in (a, b, row))
    y = (a.mT if ta else a) @ (b.mT if tb else b) + row
    return (a, b, row), y


@pytest.mark.parametrize("dtype", ELEM, ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_row(case, dtype, kernels):
    shape_a, shape_b, ta, tb = case
    a, b = random(*shape_a, dtype=dtype, seed=1), random(*shape_b, dtype=dtype, seed=2)
    row = random(shape_b[-2] if tb else shape_b[-1], dtype=dtype, seed=3)
    product = helper.make_node("FusedMatMul", ["a", "b"], ["z"], domain="ai.onnxtrain", transA=ta, transB=tb)
    for order in (["z", "row"], ["row", "z"]):
        session = session_of([product, helper.make_node("Add", order, ["y"])], {"a": a, "b": b, "row": row})
        leaves, y = reference(a, b, ta, tb, row)
        dy = random(*y.shape, dtype=dtype, seed=4)
        got, text = step(session, [a, b, row], [dy])
        assert text.split("FusedMatMul")[1].split("(")[1].split(")")[0].count(",") == 2, text
        for value, want in zip(got, (y, *torch.autograd.grad(y, leaves, dy.double())), strict=True):
            assert value.dtype == dtype
            assert_near(value, want, dtype, f"{case} {dtype}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cast(dtype, kernels):
    """Through a view as well. The gradient is rounded to the operands' type before it is multiplied,
    as the Cast does.
    """
    a, b, row = (random(*s, dtype=dtype, seed=i) for i, s in enumerate(((2, 9, 70), (70, 50), (50,))))
    nodes = [helper.make_node("MatMul", ["a", "b"], ["m"]), helper.make_node("Add", ["m", "row"], ["z"]),
             helper.make_node("Reshape", ["z", "flat"], ["v"]), helper.make_node("Cast", ["v"], ["y"], to=1)]
    leaves, want = reference(a, b, 0, 0, row)
    want = want.flatten()
    dy = random(*want.shape, dtype=torch.float32, seed=5)
    got, text = step(session_of(nodes, {"a": a, "b": b, "row": row}), [a, b, row], [dy])
    assert got[0].dtype == torch.float32 and "to = 1" in text.split("FusedMatMul")[1].split("\n")[0], text
    assert_near(got[0], want, torch.float32, "not rounded on the way")
    grads = torch.autograd.grad(want, leaves, dy.to(dtype).double())
    for value, expected in zip(got[1:], grads, strict=True):
        assert_near(value, expected, dtype, "gradient")


@pytest.mark.parametrize("keep", ["output", "reader", "column", "longer", "itself"])
def test_kept(keep):
    """The product is an output or has another reader; what is added is no row, or makes the result larger."""
    a, b = random(5, 6, dtype=torch.float32, seed=1), random(6, 7, dtype=torch.float32, seed=2)
    row = random(*{"column": (5, 1), "longer": (3, 5, 7)}.get(keep, (7,)), dtype=torch.float32, seed=3)
    nodes = [helper.make_node("MatMul", ["a", "b"], ["z"]),
             helper.make_node("Add", ["z", "z" if keep == "itself" else "row"], ["y"])]
    outputs = ["y"]
    if keep == "output":
        outputs.append("z")
    if keep == "reader":
        nodes.append(helper.make_node("Softmax", ["z"], ["s"]))
        outputs.append("s")
    inputs = {"a": a, "b": b} | ({} if keep == "itself" else {"row": row})
    session = session_of(nodes, inputs, outputs)
    got, _ = session.forward(list(inputs.values()), bytes(len(inputs)))
    assert "Add" in session.text("program")
    z = a.double() @ b.double()
    assert_near(got[0], z + (z if keep == "itself" else row.double()), torch.float32, keep)


def test_disabled():
    a, b, row = (random(*s, dtype=torch.float32, seed=i) for i, s in enumerate(((9, 70), (70, 50), (50,))))
    nodes = [helper.make_node("MatMul", ["a", "b"], ["z"]), helper.make_node("Add", ["z", "row"], ["y"])]
    dy = random(9, 50, dtype=torch.float32, seed=5)
    fused, text = step(session_of(nodes, {"a": a, "b": b, "row": row}), [a, b, row], [dy])
    _C.disable_passes(["fuse_gemm"])
    try:
        apart, other = step(session_of(nodes, {"a": a, "b": b, "row": row}), [a, b, row], [dy])
    finally:
        _C.disable_passes([])
    assert "Add" not in text and "Add" in other
    for one, two in zip(fused, apart, strict=True):
        assert_near(one, two, torch.float32, "apart")


def test_bias_of_a_model():
    """A model may name the form with a bias: it is differentiated; a bias that is no row is refused."""
    a, b, row = (random(*s, dtype=torch.float64, seed=i) for i, s in enumerate(((2, 9, 70), (50, 70), (50,))))
    node = helper.make_node("FusedMatMul", ["a", "b", "row"], ["y"], domain="ai.onnxtrain", transB=1)
    leaves, y = reference(a, b, 0, 1, row)
    dy = random(*y.shape, dtype=torch.float64, seed=5)
    got, _ = step(session_of([node], {"a": a, "b": b, "row": row}), [a, b, row], [dy])
    for value, want in zip(got, (y, *torch.autograd.grad(y, leaves, dy)), strict=True):
        assert_near(value, want, torch.float64, "model")
    column = random(9, 1, dtype=torch.float64, seed=3)
    with pytest.raises(_C.UnsupportedError, match=r"must be \(n\)"):
        session_of([node], {"a": a, "b": b, "row": column}).forward([a, b, column], bytes(3))


def test_to_of_a_model():
    """float32 out of bfloat16 operands, with a gradient; any other type is refused."""
    a, b = random(9, 70, dtype=torch.bfloat16, seed=1), random(70, 50, dtype=torch.bfloat16, seed=2)
    node = helper.make_node("FusedMatMul", ["a", "b"], ["y"], domain="ai.onnxtrain", to=1)
    leaves, y = reference(a, b, 0, 0, torch.zeros(50))
    dy = random(9, 50, dtype=torch.bfloat16, seed=5).float()
    got, _ = step(session_of([node], {"a": a, "b": b}), [a, b], [dy])
    assert got[0].dtype == torch.float32
    assert_near(got[0], y, torch.float32, "value")
    for value, want in zip(got[1:], torch.autograd.grad(y, leaves[:2], dy.double()), strict=True):
        assert_near(value, want, torch.bfloat16, "gradient")
    bad = helper.make_node("FusedMatMul", ["a", "b"], ["y"], domain="ai.onnxtrain", to=11)
    with pytest.raises(_C.UnsupportedError, match="a product of bfloat16 operands with a result in double"):
        session_of([bad], {"a": a, "b": b}).forward([a, b], bytes(2))
