"""Messages of graph networks, rows that are looked up, scaled and added, are products with a sparse matrix: equal
results and gradients with and without the pass, and what is not of this form stays apart.
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
            messages = weight.view(-1, *ones) * messages
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


def test_weights_with_a_gradient_keep_the_rows():
    """Their gradient reads the rows that were looked up; the rows' own gradient is a product all the same."""
    torch.manual_seed(0)
    model = Messages(True)
    x, edges, weight = graph()
    found = []
    for module in (model, ours := ORTModule(model)):
        leaf = weight.clone().requires_grad_()
        found.append([*train(module, (x, edges, leaf)), leaf.grad])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert text_of(ours).count("SparseMatMul") <= 1


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
    "rows that another node reads": {"keep": True, "rows": (NODES,), "weight": (NODES, 1)},
}


@pytest.mark.parametrize("name", APART)
def test_others_stay(name):
    y, text, (x, origin, to, w, _) = ran(**APART[name])
    assert "SparseMatMul" not in text and "GatherGrad" in text, text
    picked = x[origin.flatten()]
    want = torch.zeros_like(x).index_add_(0, to[:, 0], w * picked)
    torch.testing.assert_close(y, want + (picked if "keep" in APART[name] else 0))


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
