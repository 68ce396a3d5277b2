"""Gather's gradient: rows of dy added up where they were read, exactly in the order of their positions."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from onnxtrain import _C

CODE = {torch.float32: 1, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}
DTYPES = pytest.mark.parametrize("dtype", CODE, ids=str)
SORTED, PLAIN = "gather_grad_sorted", "gather_grad_ref"


def session_of(shape, index_shape, dtype, axis=0, wide=True, base=False):
    """y = Gather(x, i), and z = x * c where the gradients of two readers are to meet in x."""
    nodes = [helper.make_node("Gather", ["t", "i"], ["y"], axis=axis, name="rows")]
    nodes.insert(0, helper.make_node("Neg" if base else "Identity", ["x"], ["t"]))
    inputs = [helper.make_tensor_value_info("x", CODE[dtype], shape),
              helper.make_tensor_value_info("i", 7 if wide else 6, index_shape)]
    if base:
        nodes.append(helper.make_node("Mul", ["t", "c"], ["z"]))
        inputs.append(helper.make_tensor_value_info("c", CODE[dtype], shape))
    outputs = [onnx.ValueInfoProto(name=n) for n in ("y", "z")[:1 + base]]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())


def gradient(x, index, dy, axis=0, base=None, kernel=SORTED):
    """dx where y = Gather(x, index) has the gradient dy, plus `base` where given; which kernel had to do it."""
    inputs = [x, index] if base is None else [x, index, torch.ones_like(x)]
    session = session_of(list(x.shape), list(index.shape), x.dtype, axis, index.dtype == torch.int64, base is not None)
    outputs, run = session.forward(inputs, b"\1" + b"\0" * (len(inputs) - 1))
    assert outputs[0].shape == dy.shape
    saved = [inputs[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    dx = run.backward(saved, [dy] if base is None else [dy, base])[0]
    assert [k for _, k, backward in session.kernels() if k.startswith("gather_grad")] == [kernel], session.kernels()
    assert (" = Add (" in session.text("program")) is False
    return dx if base is None else -dx


def expected(shape, index, dy, axis=0, base=None, sums=None):
    """The same by plain loops over positions, in the dtype `sums`."""
    sums = sums or dy.dtype
    dx = torch.zeros(shape, dtype=sums) if base is None else base.to(sums, copy=True)
    rows, flat = dx.movedim(axis, 0), index.flatten().long()
    dys = dy.to(sums).reshape(*shape[:axis], flat.numel(), *shape[axis + 1:]).movedim(axis, 0)
    for position, row in enumerate(flat.tolist()):
        rows[row] += dys[position]
    return dx


def drawn(*shape, dtype, seed):
    """Multiples of 1/16 up to 2: their sums are exact in float32, so that each result is known to the bit."""
    values = np.random.default_rng(seed).integers(-32, 33, shape) / 16
    return torch.from_numpy(np.array(values, np.float64)).to(dtype)


def short(dtype, inner):
    """Whether rows are looked for by every thread: floats of the usual sizes only."""
    return dtype.itemsize > 2 and inner * dtype.itemsize < 1024


CASES = {
    "some": ((50, 160), 0, lambda rng: rng.integers(0, 50, 20)),
    "repeated": ((9, 160), 0, lambda rng: rng.integers(-9, 9, (7, 30))),
    "all one row": ((40, 1100), 0, lambda rng: np.full((3, 50), 17)),
    "one index": ((40, 160), 0, lambda rng: np.array(-3)),
    "none": ((5, 160), 0, lambda rng: np.zeros((0,))),
    "of no rows": ((0, 160), 0, lambda rng: np.zeros((0,))),
    "of no columns": ((5, 0), 0, lambda rng: np.array([1, 1])),
    "one row": ((1, 2500), 0, lambda rng: np.array([0, -1, 0])),
    "many rows": ((70000, 1), 0, lambda rng: rng.integers(-70000, 70000, 500)),
    "negative": ((300, 130), 0, lambda rng: -1 - np.arange(300)),
    "in order": ((300, 130), 0, lambda rng: np.arange(300)),
    "inner axis": ((3, 70, 150), 1, lambda rng: rng.integers(0, 70, (5, 40))),
    "last axis": ((3, 70), 1, lambda rng: rng.integers(-70, 70, 90)),
    "two outer dims": ((2, 3, 5, 140), 2, lambda rng: rng.integers(0, 5, 9)),
    "one of three": ((200, 3, 256), 1, lambda rng: np.array(1)),
}


@DTYPES
@pytest.mark.parametrize("wide", [True, False], ids=["int64", "int32"])
@pytest.mark.parametrize("with_base", [False, True], ids=["zeros", "base"])
@pytest.mark.parametrize("name", CASES)
def test_rows(name, with_base, wide, dtype):
    shape, axis, make = CASES[name]
    index = torch.from_numpy(np.array(make(np.random.default_rng(3)))).to(torch.int64 if wide else torch.int32)
    dy = drawn(*shape[:axis], *index.shape, *shape[axis + 1:], dtype=dtype, seed=4)
    base = drawn(*shape, dtype=dtype, seed=5) if with_base else None
    inner = int(np.prod(shape[axis + 1:]))
    kernel = PLAIN if short(dtype, inner) else SORTED
    got = gradient(drawn(*shape, dtype=dtype, seed=6), index, dy, axis, base, kernel)
    want = expected(shape, index, dy, axis, base, torch.float64).to(dtype)
    assert got.dtype == dtype and torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("with_base", [False, True], ids=["zeros", "base"])
def test_order_of_sums(with_base, dtype):
    """Sums are those of the positions in order, to the last bit, with both kernels."""
    rng = np.random.default_rng(8)
    index = torch.from_numpy(rng.integers(-30, 30, 900))
    x, dy, base = (torch.from_numpy(rng.normal(size=(n, 1500))).to(dtype) for n in (30, 900, 30))
    base = base if with_base else None
    want = expected((30, 1500), index, dy, base=base)
    assert torch.equal(gradient(x, index, dy, base=base), want)
    _C.disable_kernels([SORTED])
    try:
        assert torch.equal(gradient(x, index, dy, base=base, kernel=PLAIN), want)
    finally:
        _C.disable_kernels([])


@pytest.mark.parametrize("dtype, half", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=["bf16", "f16"])
@pytest.mark.parametrize("with_base", [False, True], ids=["zeros", "base"])
def test_rounded_once(with_base, dtype, half):
    """Of hundreds of 16-bit rows that meet, each sum is off by half a unit at most, and by float32's own error."""
    rng = np.random.default_rng(9)
    index = torch.from_numpy(rng.integers(0, 4, 1200))
    x, dy, base = (torch.from_numpy(rng.normal(size=(n, 1300))).to(dtype) for n in (4, 1200, 4))
    base = base if with_base else None
    got = gradient(x, index, dy, base=base).double()
    want = expected((4, 1300), index, dy, base=base, sums=torch.float64)
    assert torch.all((got - want).abs() <= half * want.abs().maximum(got.abs()) + 2e-5)
    wide = expected((4, 1300), index, dy, base=base, sums=torch.float32).to(dtype)
    assert torch.equal(got, wide.double())


@DTYPES
@pytest.mark.parametrize("name", ["zipf", "one row", "few long rows", "outer"])
def test_threads_do_not_matter(name, dtype):
    rng = np.random.default_rng(10)
    shape, axis, index = {
        "zipf": ((500, 400), 0, np.minimum(rng.zipf(1.3, 3000), 500) - 1),
        "one row": ((700, 2600), 0, np.full(100, 699)),
        "few long rows": ((3, 40000), 0, rng.integers(0, 3, 11)),
        "outer": ((6, 11, 2000), 1, rng.integers(0, 11, 30)),
    }[name]
    index = torch.from_numpy(index)
    x, dy = (torch.from_numpy(rng.normal(size=(*shape[:axis], n, *shape[axis + 1:]))).to(dtype)
             for n in (shape[axis], index.numel()))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(threads)
            results.append((gradient(x, index, dy, axis), gradient(x, index, dy, axis, torch.ones_like(x))))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], expected(shape, index, dy, axis, sums=torch.promote_types(dtype, torch.float32))
                       .to(dtype))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@DTYPES
@pytest.mark.parametrize("bad", [50, -51])
def test_out_of_range(bad, dtype):
    """An index that leaves the table between forward and backward is found there too, with node and argument."""
    x, index = drawn(50, 160, dtype=dtype, seed=1), torch.tensor([3, 4, 5])
    session = session_of([50, 160], [3], dtype)
    (y,), run = session.forward([x, index], b"\1\0")
    saved = [index.clone().fill_(3) if i == 1 else x for i in run.saved_inputs]
    assert run.saved_inputs == (1,)
    saved[0][1] = bad
    message = f"GatherGrad '.*index {bad} at position 1 of 'i' is out of range for 50 entries"
    with pytest.raises(IndexError, match=message):
        run.backward(saved, [torch.ones_like(y)])


def test_large_table_is_streamed():
    """Rows beside those that are hit are zero, to the byte, where stores go past the caches."""
    rng = np.random.default_rng(11)
    index = torch.from_numpy(rng.integers(0, 30001, 77))
    dy = torch.from_numpy(rng.normal(size=(77, 317))).float()
    got = gradient(torch.zeros(30001, 317), index, dy)
    assert torch.equal(got, torch.zeros(30001, 317).index_add_(0, index, dy))
