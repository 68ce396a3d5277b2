"""SparseMatMul and SampledMatMul, which only passes/fuse_sparse_matmul.c builds: rows of many entries, of few and of
none, any number of threads.
"""

import numpy as np
import onnx
import pytest
import torch
from harness import failing_allocations
from onnx import TensorProto, helper

from onnxtrain import _C

ELEM = {torch.float32: TensorProto.FLOAT, torch.float64: TensorProto.DOUBLE, torch.int64: TensorProto.INT64,
        torch.int32: TensorProto.INT32}


def session_of(tensors, rows, base):
    """y = weights times rows of x, added to zeros or to `base`."""
    width, entries = tensors["x"].shape[1], tensors["from"].shape[0]
    size = onnx.numpy_helper.from_array(np.array([entries, width], np.int64))
    zeros = onnx.numpy_helper.from_array(np.array([rows, width], np.int64))
    kind = ELEM[tensors["x"].dtype]
    nodes = [helper.make_node("Gather", ["x", "from"], ["picked"], axis=0),
             helper.make_node("Constant", [], ["size"], value=size),
             helper.make_node("Expand", ["to", "size"], ["at"]),
             helper.make_node("Constant", [], ["shape"], value=zeros),
             helper.make_node("ConstantOfShape", ["shape"], ["zeros"],
                              value=helper.make_tensor("value", kind, [1], [0.0]))]
    if "w" in tensors:
        nodes.insert(1, helper.make_node("Mul", ["picked", "w"], ["scaled"]))
    if base:
        nodes.append(helper.make_node("Neg", ["base"], ["below"]))  # a value of the program's, which may be written over
    nodes.append(helper.make_node("ScatterElements", ["below" if base else "zeros", "at",
                                                      "scaled" if "w" in tensors else "picked"], ["y"], axis=0,
                                  reduction="add"))
    infos = [helper.make_tensor_value_info(n, ELEM[t.dtype], t.shape) for n, t in tensors.items()]
    graph = helper.make_graph(nodes, "g", infos, [onnx.ValueInfoProto(name="y")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())


def drawn(name, dtype=torch.float32, index=torch.int64, weighted=True, base=False):
    columns, rows, entries, width, to = CASES[name]
    rng = np.random.default_rng(5)
    tensors = {"x": torch.from_numpy(rng.normal(size=(columns, width))).to(dtype),
               "from": torch.from_numpy(rng.integers(-columns, columns, entries)).to(index),
               "to": torch.from_numpy(np.asarray(to(rng, rows, entries))).to(index).view(-1, 1)}
    if weighted:
        tensors["w"] = torch.from_numpy(rng.normal(size=(entries, 1))).to(dtype)
    if base:
        tensors["base"] = torch.from_numpy(rng.normal(size=(rows, width))).to(dtype)
    return tensors


def spread(rng, rows, entries):
    return rng.integers(-rows, rows, entries)


# columns, rows, entries, elements of a row, rows of entries
CASES = {
    "some": (30, 20, 100, 16, spread),
    "many": (200, 300, 2000, 130, spread),
    "one row": (30, 20, 333, 40, lambda rng, rows, entries: np.full(entries, 7)),
    "a row of most": (30, 900, 1000, 33, lambda rng, rows, entries: np.minimum(rng.zipf(1.3, entries), rows) - 1),
    "in order": (30, 50, 50, 16, lambda rng, rows, entries: np.arange(entries)),
    "few of many rows": (30, 5000, 9, 16, spread),
    "long rows": (9, 5, 70, 5000, spread),
    "three columns": (3, 400, 900, 17, spread),
}


def expected(tensors, rows):
    x = tensors["x"].double()
    messages = x[tensors["from"].long()] * (tensors["w"].double() if "w" in tensors else 1)
    start = -tensors["base"].double() if "base" in tensors else torch.zeros(rows, x.shape[1], dtype=torch.float64)
    return start.index_add(0, tensors["to"][:, 0].long() % rows, messages)


def run(tensors, rows, kernel="sparse_matmul"):
    session = session_of(tensors, rows, "base" in tensors)
    y, = session.forward(list(tensors.values()), bytes(len(tensors)))[0]
    assert kernel in [used for _, used, _ in session.kernels()], session.text("program")
    return y


@pytest.mark.parametrize("base", [False, True], ids=["zeros", "base"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_sums_in_float64(name, dtype, index, weighted, base):
    tensors, rows = drawn(name, dtype, index, weighted, base), CASES[name][1]
    got, want = run(tensors, rows), expected(tensors, rows)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_threads_do_not_matter(name, dtype):
    tensors, before, found = drawn(name, dtype), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(threads)
            found.append(run(tensors, CASES[name][1]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_the_rows_that_are_added_to_stay_as_they_are():
    tensors = drawn("some", base=True)
    before = tensors["base"].clone()
    run(tensors, CASES["some"][1])
    assert torch.equal(tensors["base"], before)


def test_nothing_to_add():
    """Without entries there is nothing to fuse."""
    tensors = drawn("some")
    tensors = {name: t if name == "x" else t[:0] for name, t in tensors.items()}
    assert torch.equal(run(tensors, 20, "scatter_elements_ref"), torch.zeros(20, 16))


def test_an_infinite_row_stays_where_it_goes():
    """Entries of other rows do not read it."""
    tensors = drawn("many")
    tensors["x"][3] = torch.inf
    got, want = run(tensors, 300), expected(tensors, 300).float()
    assert torch.equal(got.isfinite(), want.isfinite())


def test_failing_allocations():
    tensors = drawn("many")
    run(tensors, 300)  # what is allocated once a process
    failing_allocations(lambda: run(tensors, 300), "SparseMatMul")


def sampled(dtype, threads):
    """Inner products of drawn rows, by the engine and in float64."""
    rng, before = np.random.default_rng(6), torch.get_num_threads()
    a, b = (torch.from_numpy(rng.normal(size=(n, 4, 33))).to(dtype) for n in (30, 50))
    i, j = (torch.from_numpy(rng.integers(0, n, 3000)) for n in (30, 50))
    nodes = [helper.make_node("Gather", ["a", "i"], ["p"], axis=0), helper.make_node("Gather", ["b", "j"], ["q"], axis=0),
             helper.make_node("Mul", ["p", "q"], ["pq"]), helper.make_node("Constant", [], ["axes"], value_ints=[-1]),
             helper.make_node("ReduceSum", ["pq", "axes"], ["y"], keepdims=0)]
    infos = [helper.make_tensor_value_info(n, ELEM[t.dtype], t.shape) for n, t in zip("abij", (a, b, i, j))]
    graph = helper.make_graph(nodes, "g", infos, [onnx.ValueInfoProto(name="y")])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                           ir_version=10).SerializeToString())
    try:
        torch.set_num_threads(threads)
        y, = session.forward([a, b, i, j], b"\0\0\0\0")[0]
    finally:
        torch.set_num_threads(before)
    assert [kernel for _, kernel, _ in session.kernels()] == ["sampled_matmul"]
    return y, (a.double()[i] * b.double()[j]).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inner_products(dtype):
    first, want = sampled(dtype, 1)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(first.double(), want, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(sampled(dtype, threads)[0], first) for threads in (3, 7, 16))
    failing_allocations(lambda: sampled(dtype, 1), "SampledMatMul")


@pytest.mark.parametrize("name", ["SparseMatMul", "SampledMatMul"])
def test_a_model_cannot_name_it(name):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "xy"]
    indices = [helper.make_tensor_value_info(name, TensorProto.INT64, [2]) for name in "ab"]
    graph = helper.make_graph([helper.make_node(name, ["x", "a", "b", "b"], ["y"], domain="ai.onnxtrain")], "g",
                              [values[0], *indices], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)],
                              ir_version=10)
    with pytest.raises(ValueError, match=f"{name} is an internal operator"):
        _C.Session(model.SerializeToString())
