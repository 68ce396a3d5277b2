"""A program is built for what decides about it, is evicted while it is in use, and refuses sizes without addresses."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from test_session import FLOAT, X, model

from onnxtrain import _C


@pytest.mark.parametrize("count", [1 << 58, (1 << 60) - 16, (1 << 60) - 1])
def test_results_that_have_no_addresses(count):
    """Each has a size that is allowed; together they would wrap around."""
    names = [f"v{i}" for i in range(64)]
    nodes = [helper.make_node("Expand", ["x", "shape"], ["e"])]
    nodes += [helper.make_node("Softplus", [a], [b]) for a, b in zip(["e", *names], names)]
    nodes += [helper.make_node("Sum", names, ["s"]), helper.make_node("ReduceMax", ["s"], ["y"], keepdims=0)]
    session = _C.Session(model(nodes, {"x": [1]}, ["y"], shape=np.array([count], np.int64)))
    with pytest.raises(MemoryError, match="out of memory"):
        session.forward([torch.ones(1)], b"\0")
    assert session.stats()["slab_bytes"] >= 0


def test_an_empty_tensor_that_decides_about_the_program():
    """Known and empty is not the same as not known: the search for its content ends."""
    graph = helper.make_graph([helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)], "g",
                              [helper.make_tensor_value_info("x", FLOAT, [2, 3]),
                               helper.make_tensor_value_info("axes", TensorProto.INT64, ["n"])],
                              [helper.make_tensor_value_info("y", FLOAT, None)])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)],
                                           ir_version=10).SerializeToString())
    for axes, expected in (([], 6.0), ([0], [2.0] * 3), ([1], [3.0] * 2), ([], 6.0)):
        outputs, _ = session.forward([X, torch.tensor(axes, dtype=torch.int64)], b"\0\0")
        assert outputs[0].tolist() == expected


@pytest.mark.parametrize("describe", [
    lambda s, shapes: s.kernels(), lambda s, shapes: [entry[:3] for entry in s.timeline()],
    lambda s, shapes: s.plan(shapes, b"\0")["steps"]], ids=["kernels", "timeline", "plan"])
def test_a_program_that_is_evicted_while_it_is_described(describe):
    """The collector runs finalizers between two items of a list."""
    names = [f"v{i}" for i in range(64)]
    nodes = [helper.make_node("Softplus" if i % 2 else "CumSum", [a] if i % 2 else [a, "axis"], [b], name=f"node{i}")
             for i, (a, b) in enumerate(zip(["x", *names], names))]
    session = _C.Session(model(nodes, {"x": ["n"]}, [names[-1]], axis=np.array(0)), 1)

    def evict(phase, info):
        for n in (5, 6, 7):
            session.forward([torch.ones(n)], b"\0")

    session.forward([torch.ones(4)], b"\0")
    want = describe(session, [[4]])
    before = gc.get_threshold()
    gc.callbacks.append(evict)
    gc.set_threshold(10)
    try:
        found = describe(session, [[4]])
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(evict)
    assert found == want and len(found) > 30
