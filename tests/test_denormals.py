"""Denormal floats count as zero while a program runs, on its threads alone;
torch's own setting is as it was afterwards.
"""

import onnx
import pytest
import torch
from onnx import helper

from onnxtrain import _C

TINY = 1e-40


def double_of(shape):
    """A session that adds its input to itself."""
    inputs = [helper.make_tensor_value_info("x", 1, shape)]
    nodes = [helper.make_node("Add", ["x", "x"], ["d"]), helper.make_node("Neg", ["d"], ["n"]),
             helper.make_node("Transpose", ["n"], ["t"]), helper.make_node("Neg", ["t"], ["y"])]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return _C.Session(model.SerializeToString())


def torch_keeps(shape):
    """How many elements of a tensor torch's own arithmetic keeps, on all its threads."""
    return int(((torch.full(shape, TINY) + TINY) != 0).sum())


@pytest.fixture(params=[1, 2, 4], ids="{} threads".format, autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(64, 64), (2048, 1536)], ids=["small", "large"])
def test_flushed_and_restored(shape):
    session = double_of(shape)
    x = torch.full(shape, TINY)
    (y,), _ = session.forward([x], b"\0")
    assert not y.any()
    assert torch_keeps(shape) == x.numel()
    _C.set_flush_denormals(False)
    try:
        (y,), _ = session.forward([x], b"\0")
    finally:
        _C.set_flush_denormals(True)
    assert torch.equal(y, (x + x).T) and y.all()


@pytest.mark.parametrize("shape", [(64, 64), (2048, 1536)], ids=["small", "large"])
def test_after_torch_flushes(shape):
    """torch.set_flush_denormal() speaks of the calling thread: it stays set there, and other threads stay without."""
    x = torch.full(shape, TINY)
    kept = []
    for run in (lambda: None, lambda: double_of(shape).forward([x], b"\0")):
        assert torch.set_flush_denormal(True)
        try:
            run()
            assert not (torch.full((8,), TINY) + TINY).any()
            kept.append(torch_keeps(shape))
        finally:
            torch.set_flush_denormal(False)
    assert kept[0] == kept[1]
