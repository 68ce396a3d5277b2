"""Lookups and sums with an index for each element become those of whole rows where the indices are expanded over rows,
with eager's results, gradients and errors; others stay.
"""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from test_fuse_gemm import random

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

ELEM = {torch.float32: onnx.TensorProto.FLOAT, torch.float64: onnx.TensorProto.DOUBLE, torch.int64: onnx.TensorProto.INT64}
GATHERS, SCATTERS = ("GatherElements", "TorchGatherElements"), ("ScatterElements", "TorchScatterElements")
# data, axis, indices along it
CASES = [((7, 5), 0, 11), ((7, 5), 1, 3), ((4, 6, 3), 1, 9), ((4, 6, 3), -1, 2), ((9,), 0, 4), ((3, 1, 130), 0, 40)]


@pytest.fixture(autouse=True)
def reset():
    yield
    _C.disable_passes([])


def session_of(nodes, inputs):
    """inputs: name -> tensor."""
    infos = [helper.make_tensor_value_info(n, ELEM[x.dtype], x.shape) for n, x in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)]
    return _C.Session(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def full_shape(data, axis, n):
    shape = list(data)
    shape[axis] = n
    return shape


def program(op, data, axis, indices, expanded=None, dtype=torch.float32, **attributes):
    """Session, tensors (data and, for a scatter, updates; int64 indices last), and the gradient of the result."""
    shape = list(expanded or full_shape(data, axis, indices.numel()))
    rows = [1] * len(data)
    rows[axis] = indices.numel()
    tensors = {"x": random(*data, dtype=dtype, seed=1)}
    if op in SCATTERS:
        tensors["u"] = random(*shape, dtype=dtype, seed=2)
        attributes.setdefault("reduction", "add")
    tensors["i"] = indices.view(rows)
    size = onnx.numpy_helper.from_array(np.array(shape, np.int64))
    nodes = [helper.make_node("Constant", [], ["size"], value=size), helper.make_node("Expand", ["i", "size"], ["at"]),
             helper.make_node(op, ["x", "at", *["u"] * (op in SCATTERS)], ["y"], axis=axis, **attributes,
                              domain="ai.onnxtrain" if op.startswith("Torch") else "")]
    dy = random(*(data if op in SCATTERS else shape), dtype=dtype, seed=3)
    return session_of(nodes, tensors), list(tensors.values()), dy


def run(session, tensors, dy):
    wants = bytes([1] * (len(tensors) - 1) + [0])
    (y,), ran = session.forward(tensors, wants)
    saved = [tensors[i] for i in ran.saved_inputs] + [[y][i] for i in ran.saved_outputs]
    return [y, *[g for g in ran.backward(saved, [dy]) if g is not None]], session.text("program")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", [*GATHERS, *SCATTERS])
@pytest.mark.parametrize(("data", "axis", "n"), CASES, ids=str)
def test_equals_torch(op, data, axis, n, dtype):
    torch.manual_seed(0)
    indices = torch.randint(0, data[axis], (n,))
    session, tensors, dy = program(op, data, axis, indices, dtype=dtype)
    results, text = run(session, tensors, dy)
    assert "Elements" not in text and "Gather" in text, text
    wide = [t.double().requires_grad_() for t in tensors[:-1]]
    at = tensors[-1].expand(full_shape(data, axis, n))
    y = wide[0].gather(axis, at) if op in GATHERS else wide[0].scatter_add(axis, at, wide[1])
    y.backward(dy.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for got, want in zip(results, [y, *[t.grad for t in wide]], strict=True):
        torch.testing.assert_close(got.double(), want.detach(), rtol=tolerance, atol=tolerance)
    _C.disable_passes(["row_indices"])
    others, text = run(*program(op, data, axis, indices, dtype=dtype))
    assert "Elements" in text
    for got, want in zip(others, results, strict=True):
        torch.testing.assert_close(got, want)


LEFT = {
    "another reduction": ("ScatterElements", (7, 5), 0, None, {"reduction": "mul"}),
    "no reduction": ("ScatterElements", (7, 5), 0, None, {"reduction": "none"}),
    "a part of each row": ("GatherElements", (7, 5), 0, (4, 3), {}),
    "sums of a part of each row": ("TorchScatterElements", (7, 5), 0, (4, 3), {}),
}


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name):
    op, data, axis, expanded, attributes = LEFT[name]
    session, tensors, _ = program(op, data, axis, torch.tensor([3, 1, 6, 0]), expanded, **attributes)
    session.forward(tensors, bytes(len(tensors)))
    assert op in session.text("program")


def test_an_index_for_each_element_stays():
    data, at = random(5, 4, dtype=torch.float32, seed=1), torch.randint(0, 5, (3, 4))
    session = session_of([helper.make_node("GatherElements", ["x", "i"], ["y"])], {"x": data, "i": at})
    assert torch.equal(session.forward([data, at], b"\0\0")[0][0], data.gather(0, at))
    assert "GatherElements" in session.text("program")


@pytest.mark.parametrize("op", [*GATHERS, *SCATTERS])
@pytest.mark.parametrize("index", [-1, -8, 7])
def test_indices_out_of_range(op, index):
    """Those of torch's operators are not counted from the end."""
    session, tensors, _ = program(op, (7, 5), 0, torch.tensor([3, index, 0]))
    if index == -1 and not op.startswith("Torch"):
        y, = session.forward(tensors, bytes(len(tensors)))[0]
        at = torch.tensor([[3], [6], [0]]).expand(3, 5)
        want = tensors[0].gather(0, at) if op in GATHERS else tensors[0].scatter_add(0, at, tensors[1])
        torch.testing.assert_close(y, want)
        return
    with pytest.raises(IndexError, match=str(index)):
        session.forward(tensors, bytes(len(tensors)))


class Sums(torch.nn.Module):
    """As torch_geometric sums messages at nodes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 8, dtype=torch.float64)

    def forward(self, x, edges):
        messages = self.layer(x)[edges[0]]
        at = edges[1].view(-1, 1).expand_as(messages)
        sums = messages.new_zeros(x.shape[0], 8).scatter_add_(0, at, messages)
        return sums.gather(0, at)


def test_a_graph_network():
    torch.manual_seed(0)
    model, x, edges = Sums(), torch.randn(9, 6, dtype=torch.float64), torch.randint(0, 9, (2, 30))
    found = []
    for module in (model, ORTModule(model)):
        model.zero_grad()
        y = module(x, edges)
        (y * y).sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12)
