"""Shapes that depend on contents: a probe computes them, and a program is built for what it found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from onnxtrain import _C


def session_of(nodes, inputs, outputs, constants=None, opset=20) -> _C.Session:
    """inputs: name -> (element type, dims)."""
    infos = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()]
    values = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    outs = [helper.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, "facts", infos, outs, values)
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)],
                                        ir_version=10).SerializeToString())


def backward(run, inputs, outputs, grads):
    saved = [inputs[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    return run.backward(saved, grads)


def test_runtime_shape_is_probed_and_cached_by_contents():
    session = session_of([helper.make_node("Reshape", ["x", "s"], ["y"]), helper.make_node("Mul", ["y", "y"], ["z"])],
                         {"x": (T.DOUBLE, ["a", "b"]), "s": (T.INT64, [2])}, ["z"])
    x = torch.randn(4, 6, dtype=torch.float64)
    for dims in ([3, 8], [8, 3], [3, 8], [-1, 2]):
        inputs = [x, torch.tensor(dims)]
        outputs, run = session.forward(inputs, b"\1\0")
        assert torch.equal(outputs[0], (x * x).reshape(dims))
        grad = torch.randn_like(outputs[0])
        got, none = backward(run, inputs, outputs, [grad])
        assert none is None
        assert torch.allclose(got, 2 * x * grad.reshape(4, 6), atol=1e-14)
    stats = session.stats()
    assert (stats["probes_built"], stats["probe_runs"], stats["programs_built"], stats["program_hits"]) == (1, 4, 3, 1)


def test_facts_come_in_rounds():
    """The size of the second shape depends on contents behind the first."""
    nodes = [
        helper.make_node("Reshape", ["x", "s"], ["y"]),
        helper.make_node("Shape", ["y"], ["dims"]),
        helper.make_node("ReduceMax", ["y"], ["top"], keepdims=0),
        helper.make_node("Cast", ["top"], ["count"], to=T.INT64),
        helper.make_node("Unsqueeze", ["count", "zero"], ["count1"]),
        helper.make_node("Concat", ["count1", "dims"], ["target"], axis=0),
        helper.make_node("Expand", ["y", "target"], ["z"]),
    ]
    session = session_of(nodes, {"x": (T.DOUBLE, [6]), "s": (T.INT64, [2])}, ["z"], {"zero": np.array([0])})
    x = torch.arange(6, dtype=torch.float64)
    inputs = [x, torch.tensor([2, 3])]
    outputs, run = session.forward(inputs, b"\1\0")
    assert outputs[0].shape == (5, 2, 3) and torch.equal(outputs[0], x.reshape(2, 3).expand(5, 2, 3))
    assert session.stats()["probes_built"] <= 2
    grad = torch.randn_like(outputs[0])
    assert torch.allclose(backward(run, inputs, outputs, [grad])[0], grad.sum(0).reshape(6))


def test_a_probed_float_keeps_its_gradient():
    """A float that decides about the program as well as flowing into a result is not taken for a constant there."""
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["limit"]),
        helper.make_node("Range", ["zero", "limit", "one"], ["r"]),
        helper.make_node("Mul", ["r", "limit"], ["y"]),
    ]
    session = session_of(nodes, {"x": (T.DOUBLE, [])}, ["y"], {"two": 2.0, "zero": 0.0, "one": 1.0})
    for value in (1.5, 2.0):
        x = torch.tensor(value, dtype=torch.float64)
        outputs, run = session.forward([x], b"\1")
        steps = torch.arange(0, 2 * value, 1.0, dtype=torch.float64)
        assert torch.equal(outputs[0], steps * 2 * value)
        assert torch.allclose(backward(run, [x], outputs, [torch.ones_like(outputs[0])])[0], 2 * steps.sum())


def test_shapes_that_depend_on_shapes_cost_no_probe_and_no_step():
    nodes = [
        helper.make_node("Shape", ["x"], ["dims"]),
        helper.make_node("Gather", ["dims", "one"], ["last"], axis=0),
        helper.make_node("Concat", ["last", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
        helper.make_node("Neg", ["y"], ["z"]),
    ]
    session = session_of(nodes, {"x": (T.FLOAT, ["a", "b"])}, ["z"], {"one": np.array([1]), "rest": np.array([-1])})
    outputs, _ = session.forward([torch.ones(3, 4)], b"\0")
    assert outputs[0].shape == (4, 3)
    assert session.stats()["probe_runs"] == 0 and len(session.kernels()) == 1


def test_what_is_too_large_to_decide_is_refused_by_name():
    session = session_of([helper.make_node("ConstantOfShape", ["s"], ["y"])], {"s": (T.INT64, [1 << 14])}, ["y"])
    with pytest.raises(_C.UnsupportedError, match="'s' depends on data, and is too large to specialise"):
        session.forward([torch.ones(1 << 14, dtype=torch.int64)], b"\0")


def test_failures_leak_nothing():
    session_of_case = lambda: session_of([helper.make_node("Reshape", ["x", "s"], ["y"])],  # noqa: E731
                                         {"x": (T.FLOAT, [6]), "s": (T.INT64, [2])}, ["y"])
    x, s = torch.ones(6), torch.tensor([2, 3])
    session_of_case().forward([x, s], b"\1\0")
    live = _C.live_blocks()
    for countdown in range(4000):
        _C.fail_allocation_after(countdown)
        failed = False
        try:
            session_of_case().forward([x, s], b"\1\0")
        except MemoryError:
            failed = True
        finally:
            _C.fail_allocation_after(-1)
        assert _C.live_blocks() == live, countdown
        if not failed:
            return
    raise AssertionError("too many allocations")


def test_a_fact_of_nothing():
    """Axes without entries, given at run time: there is nothing to read, and still it is known."""
    session = session_of([helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)],
                         {"x": (T.DOUBLE, ["a", "b"]), "axes": (T.INT64, ["k"])}, ["y"])
    x = torch.randn(3, 4, dtype=torch.float64)
    for axes in ([], [1], [], [0, 1]):
        inputs = [x, torch.tensor(axes, dtype=torch.int64)]
        outputs, run = session.forward(inputs, b"\1\0")
        assert torch.allclose(outputs[0], x.sum(axes) if axes else x.sum())
        got = backward(run, inputs, outputs, [torch.ones_like(outputs[0])])[0]
        assert torch.equal(got, torch.ones_like(x))


def test_a_float_that_decides_and_is_a_value_as_well():
    """The depth of OneHot decides, its values carry a gradient: one float as both keeps that gradient."""
    nodes = [helper.make_node("Mul", ["x", "x"], ["d"]), helper.make_node("Unsqueeze", ["d", "zero"], ["d1"]),
             helper.make_node("Concat", ["off", "d1"], ["values"], axis=0),
             helper.make_node("OneHot", ["i", "d", "values"], ["y"])]
    session = session_of(nodes, {"x": (T.DOUBLE, []), "i": (T.INT64, ["n"])}, ["y"],
                         {"zero": np.array([0]), "off": np.array([0.5])})
    inputs = [torch.tensor(2.0, dtype=torch.float64), torch.tensor([0, 3, 1])]
    outputs, run = session.forward(inputs, b"\1\0")
    assert outputs[0].shape == (3, 4) and float(outputs[0][1, 3]) == 4.0
    assert float(backward(run, inputs, outputs, [torch.ones_like(outputs[0])])[0]) == 3 * 2 * 2.0
