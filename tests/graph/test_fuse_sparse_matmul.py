"""Messages of graph networks, rows that are looked up, scaled and added, are products with a sparse matrix, and the
gradients of their scales are inner products: equal results and gradients with and without the pass, and what is not of
this form stays apart.
"""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from test_row_indices import session_of

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

NODES, EDGES = 9, 40


@pytest.fixture(autouse=True)
def reset():
    yield
    _C.disable_passes([])


class Messages(torch.nn.Module):
    """As torch_geometric passes them; `weighted`: by a number for each edge."""

    def __init__(self, weighted, shape=(16,), dtype=torch.float64):
        super().__init__()
        self.layer = torch.nn.Linear(6, int(np.prod(shape)), dtype=dtype)
        self.weighted, self.shape = weighted, shape

    def forward(self, x, edges, weight):
        rows = self.layer(x).view(len(x), *self.shape)
        messages = rows.index_select(0, edges[0])
        ones = [1] * len(self.shape)
        if self.weighted:
            messages = weight.view(*weight.shape, *[1] * (messages.dim() - weight.dim())) * messages
        at = edges[1].view(-1, *ones).expand_as(messages)
        return messages.new_zeros(rows.shape).scatter_add_(0, at, messages).tanh()


def graph(seed=0, dtype=torch.float64, nodes=NODES, edges=EDGES):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(nodes, 6, generator=draw, dtype=dtype), torch.randint(0, nodes, (2, edges), generator=draw),
            torch.rand(edges, generator=draw, dtype=dtype))


def text_of(module):
    return "".join(session.text("program") for _, programs in module._all_programs() for program in programs
                   for session in program.sessions)


def train(module, arguments):
    module.zero_grad()
    y = module(*arguments)
    (y * y).sum().backward()
    return [y.detach(), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("shape", [(16,), (3, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_both_directions_are_products(weighted, dtype, shape):
    torch.manual_seed(0)
    model = Messages(weighted, shape, dtype)
    ours, found = ORTModule(model), []
    for seed in range(3):
        arguments = graph(seed, dtype, nodes=NODES + seed, edges=EDGES - 7 * seed)
        want = train(model, arguments)
        found.append(train(ours, arguments))
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        for one, eager in zip(found[-1], want, strict=True):
            torch.testing.assert_close(one, eager, rtol=tolerance, atol=tolerance)
    text = text_of(ours)
    assert text.count("SparseMatMul") == 2 and "GatherGrad" not in text and " Mul " not in text, text
    _C.disable_passes(["fuse_sparse_matmul"])
    apart = ORTModule(model)
    for seed, one in enumerate(found):
        arguments = graph(seed, dtype, nodes=NODES + seed, edges=EDGES - 7 * seed)
        for got, fused in zip(train(apart, arguments), one, strict=True):
            torch.testing.assert_close(got, fused, rtol=tolerance, atol=tolerance)
    assert "GatherGrad" in text_of(apart) and "SparseMatMul" not in text_of(apart)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "heads"), [((16,), ()), ((3, 8), ()), ((3, 8), (3,)), ((1, 20), (1,)),
                                              ((2, 3, 4), (2,)), ((2, 3, 4), (2, 3))], ids=str)
def test_gradients_of_weights_are_inner_products(shape, heads, dtype):
    """As attention between nodes has them, for each head."""
    torch.manual_seed(0)
    model = Messages(True, shape, dtype)
    ours = ORTModule(model)
    x, edges, _ = graph(dtype=dtype)
    weight, found = torch.randn(EDGES, *heads, dtype=dtype), []
    for module in (model, ours):
        leaf = weight.clone().requires_grad_()
        found.append([*train(module, (x, edges, leaf)), leaf.grad])
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    text = text_of(ours)
    assert text.count("SparseMatMul") == 2 and text.count("SampledMatMul") == 1, text
    assert f"[{EDGES},{','.join(map(str, shape))}]" not in text, text  # no row is stored for each edge


def program(weight=(EDGES, 1), axis=0, width=16, rows=(EDGES,), dtype=torch.float32, keep=False, op="Gather"):
    """y = sums of messages over `x`; the conditions that the pass checks, one argument each."""
    count = int(np.prod(rows))
    tensors = {"x": torch.randn(NODES, width, dtype=dtype), "from": torch.randint(0, NODES, rows),
               "to": torch.randint(0, NODES, rows).view(-1, 1) if len(rows) == 1 else torch.randint(0, NODES, (count, 1)),
               "w": torch.randn(*weight, dtype=dtype), "zeros": torch.zeros(NODES, width, dtype=dtype)}
    looked_up = [helper.make_node(op, ["x", "from"], ["picked"], axis=axis, domain="ai.onnxtrain" if op != "Gather" else "")]
    if len(rows) > 1:
        size = onnx.numpy_helper.from_array(np.array([count, width], np.int64))
        looked_up = [helper.make_node("Gather", ["x", "from"], ["apart"], axis=axis),
                     helper.make_node("Constant", [], ["flat"], value=size),
                     helper.make_node("Reshape", ["apart", "flat"], ["picked"])]
    full = onnx.numpy_helper.from_array(np.array([count, width], np.int64))
    nodes = [*looked_up, helper.make_node("Mul", ["w", "picked"], ["scaled"]),
             helper.make_node("Constant", [], ["full"], value=full),
             helper.make_node("Expand", ["to", "full"], ["at"]),
             helper.make_node("ScatterElements", ["zeros", "at", "scaled"], ["sums"], axis=0, reduction="add"),
             helper.make_node("Add", ["sums", "picked" if keep else "zeros"], ["y"])]
    return session_of(nodes, tensors), list(tensors.values())


def ran(**conditions):
    torch.manual_seed(1)
    session, tensors = program(**conditions)
    y, = session.forward(tensors, bytes(len(tensors)))[0]
    return y, session.text("program"), tensors


def test_the_form_itself():
    for op in ("Gather", "TorchGather"):
        y, text, (x, origin, to, w, _) = ran(op=op)
        assert "SparseMatMul" in text and "GatherGrad" not in text, text
        want = torch.zeros_like(x).index_add_(0, to[:, 0], w * x[origin])
        torch.testing.assert_close(y, want)


APART = {
    "a weight for each column": {"weight": (1, 16)},
    "a weight for each element": {"weight": (EDGES, 16)},
    "rows of less than 64 bytes": {"width": 8},
    "indices of two dims": {"rows": (4, 10)},
}


@pytest.mark.parametrize("name", APART)
def test_others_stay(name):
    y, text, (x, origin, to, w, _) = ran(**APART[name])
    assert "SparseMatMul" not in text and "GatherGrad" in text, text
    torch.testing.assert_close(y, torch.zeros_like(x).index_add_(0, to[:, 0], w * x[origin.flatten()]))


def test_rows_that_another_node_reads_are_looked_up():
    y, text, (x, origin, to, w, _) = ran(keep=True, rows=(NODES,), weight=(NODES, 1))
    assert "SparseMatMul" in text and " Gather <" in text, text
    torch.testing.assert_close(y, torch.zeros_like(x).index_add_(0, to[:, 0], w * x[origin]) + x[origin])


PRODUCTS = {  # shapes of a and b, axes of the sum, and whether it is of inner products
    "rows": ((7, 16), (9, 16), [-1], True),
    "heads": ((7, 3, 8), (9, 3, 8), [-1], True),
    "all of a row": ((7, 3, 8), (9, 3, 8), [1, 2], True),
    "over heads": ((7, 3, 8), (9, 3, 8), [1], False),
    "over entries": ((7, 16), (9, 16), [0], False),
    "short heads": ((7, 8, 3), (9, 8, 3), [-1], False),
}


@pytest.mark.parametrize("op", ["Gather", "TorchGather"])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("name", PRODUCTS)
def test_inner_products(name, keep, op):
    a, b, axes, fused = PRODUCTS[name]
    torch.manual_seed(2)
    tensors = {"a": torch.randn(a), "b": torch.randn(b), "i": torch.randint(0, 7, (EDGES,)),
               "j": torch.randint(0, 9, (EDGES,))}
    domain = "" if op == "Gather" else "ai.onnxtrain"
    nodes = [helper.make_node(op, ["a", "i"], ["p"], axis=0, domain=domain),
             helper.make_node("Gather", ["b", "j"], ["q"], axis=0), helper.make_node("Mul", ["p", "q"], ["pq"]),
             helper.make_node("Constant", [], ["axes"], value_ints=axes),
             helper.make_node("ReduceSum", ["pq", "axes"], ["y"], keepdims=keep)]
    session = session_of(nodes, tensors)
    for last in (-1, 0):  # counted from the end where ONNX's operator looks up
        tensors["j"][4] = last
        y, = session.forward(list(tensors.values()), b"\0\0\0\0")[0]
        want = (tensors["a"][tensors["i"]] * tensors["b"][tensors["j"]]).sum(axes, keepdim=bool(keep))
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    assert ("SampledMatMul" in session.text("program")) == fused
    tensors["i"][3] = -1
    if op == "TorchGather":
        with pytest.raises(IndexError, match="-1 at position 3 of 'i'"):
            session.forward(list(tensors.values()), b"\0\0\0\0")


@pytest.mark.parametrize(("op", "index", "error"), [
    ("Gather", NODES, True), ("Gather", -NODES - 1, True), ("TorchGather", -1, True), ("Gather", -1, False)])
def test_indices_are_those_of_the_lookup(op, index, error):
    """Counted from the end by ONNX's operator, refused by torch's."""
    torch.manual_seed(1)
    session, tensors = program(op=op)
    tensors[1][3] = index
    if error:
        with pytest.raises(IndexError, match=f"{index} at position 3 of 'from'"):
            session.forward(tensors, bytes(len(tensors)))
        return
    y, = session.forward(tensors, bytes(len(tensors)))[0]
    x, origin, to, w, _ = tensors
    torch.testing.assert_close(y, torch.zeros_like(x).index_add_(0, to[:, 0], w * x[origin]))


def test_sums_into_the_rows_that_are_read():
    """The base is the table itself: its rows must not change while others read them."""
    x, origin, to = torch.randn(NODES, 16), torch.randint(0, NODES, (EDGES,)), torch.randint(0, NODES, (EDGES, 1))
    size = onnx.numpy_helper.from_array(np.array([EDGES, 16], np.int64))
    nodes = [helper.make_node("Neg", ["x"], ["t"]), helper.make_node("Gather", ["t", "from"], ["picked"], axis=0),
             helper.make_node("Constant", [], ["size"], value=size), helper.make_node("Expand", ["to", "size"], ["at"]),
             helper.make_node("ScatterElements", ["t", "at", "picked"], ["y"], axis=0, reduction="add")]
    session = session_of(nodes, {"x": x, "from": origin, "to": to})
    y, = session.forward([x, origin, to], b"\0\0\0")[0]
    assert "SparseMatMul" in session.text("program")
    torch.testing.assert_close(y, (-x).index_add(0, to[:, 0], -x[origin]))
