"""Domain ai.onnx.preview.training: the suite's tests of Adagrad, Adam and Momentum, their formulas,
and Gradient within a graph.
"""

import numpy as np
import onnx.backend.test.loader as loader
import pytest
import torch
from onnx import TensorProto, ValueInfoProto, helper

from onnxtrain import _C, UnsupportedError, backend

TRAINING = "ai.onnx.preview.training"
SUITE = [c for c in loader.load_model_tests(kind="node") if any(n.domain == TRAINING for n in c.model.graph.node)]


@pytest.mark.parametrize("case", SUITE, ids=lambda c: c.name)
def test_suite(case):
    for inputs, outputs in case.data_sets:
        got = backend.run_model(case.model, inputs)
        for g, w in zip(got, outputs, strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-7)


def test_suite_has_them():
    assert {n.op_type for c in SUITE for n in c.model.graph.node} == {"Adagrad", "Adam", "Momentum"}


def step(op_type, arrays, n_outputs, **attrs):
    names = [f"x{i}" for i in range(len(arrays))]
    node = helper.make_node(op_type, names, [f"y{i}" for i in range(n_outputs)], domain=TRAINING, **attrs)
    return backend.run_node(node, arrays, opset_version=1)


@pytest.mark.parametrize("t", [0, 1, 7])
def test_adam_formula(t):
    x, g, v, h = (np.random.default_rng(i).uniform(-1, 1, (3, 2)) for i in range(4))
    h = np.abs(h)
    got = step("Adam", [np.array(0.1), np.array(t), x, g, v, h], 3, alpha=0.8, beta=0.9, epsilon=1e-3,
               norm_coefficient=0.01, norm_coefficient_post=0.02)
    alpha, beta, eps, norm, post = 0.8, 0.9, 1e-3, 0.01, 0.02
    rate = 0.1 * np.sqrt(1 - beta**t) / (1 - alpha**t) if t else 0.1
    g = g + norm * x
    v, h = alpha * v + (1 - alpha) * g, beta * h + (1 - beta) * g * g
    for a, b in zip(got, ((1 - post) * (x - rate * v / (np.sqrt(h) + eps)), v, h), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("t, mode", [(0, "standard"), (3, "standard"), (3, "nesterov")])
def test_momentum_formula(t, mode):
    arrays = [np.random.default_rng(i).uniform(-1, 1, 4) for i in range(3)]
    x, g, v = arrays
    got = step("Momentum", [np.array(0.1), np.array(t), *arrays], 2, alpha=0.5, beta=0.25, norm_coefficient=0.0,
               mode=mode)
    v = 0.5 * v + (0.25 if t else 1) * g
    for a, b in zip(got, (x - 0.1 * (g + 0.5 * v if mode == "nesterov" else v), v), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_errors_of_steps():
    x = np.zeros(2)
    with pytest.raises(ValueError, match="mode"):
        step("Momentum", [np.array(0.1), np.array(1), x, x, x], 2, alpha=0.5, beta=0.5, norm_coefficient=0.0,
             mode="heavy")
    with pytest.raises(ValueError, match="same shapes"):
        step("Adagrad", [np.array(0.1), np.array(1), x, np.zeros(3), x], 2)


def gradient(nodes, given, xs, y, outputs, zs=()):
    """A session of the nodes and a Gradient of y by xs at the values that it names."""
    node = helper.make_node("Gradient", [*xs, *zs], [f"d{i}" for i in range(len(xs))], domain=TRAINING, xs=list(xs),
                            y=y, **({"zs": list(zs)} if zs else {}))
    graph = helper.make_graph([*nodes, node, *outputs], "g", [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [3])
                                                              for n in given],
                              [ValueInfoProto(name=o) for o in ([f"d{i}" for i in range(len(xs))] if not outputs
                                                                else [outputs[-1].output[0]])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(TRAINING, 1)],
                              ir_version=10)
    return _C.Session(model.SerializeToString())


A, B = (torch.tensor(v, dtype=torch.float64) for v in ([0.5, -1.0, 2.0], [1.5, 2.0, -0.5]))
MUL = [helper.make_node("Mul", ["a", "b"], ["c"]), helper.make_node("Sin", ["c"], ["s"]),
       helper.make_node("Mul", ["s", "a"], ["y"])]


def test_gradient_of_a_chain():
    (da, db), _ = gradient(MUL, ["a", "b"], ["a", "b"], "y", []).forward([A, B], b"\0\0")
    torch.testing.assert_close(da, torch.sin(A * B) + A * torch.cos(A * B) * B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(db, A * torch.cos(A * B) * A, rtol=1e-13, atol=1e-13)


def test_named_values_are_independent():
    """By c and a: c counts as given, so a is only the factor at the end."""
    (dc, da), _ = gradient(MUL, ["a", "b"], ["c", "a"], "y", [], zs=["b"]).forward([A, B], b"\0\0")
    torch.testing.assert_close(dc, A * torch.cos(A * B), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(da, torch.sin(A * B), rtol=1e-13, atol=1e-13)


def test_what_nothing_depends_on_is_zero():
    made = gradient([helper.make_node("Exp", ["a"], ["y"])], ["a", "b"], ["a", "b"], "y", [])
    (da, db), _ = made.forward([A, B], b"\0\0")
    torch.testing.assert_close(da, A.exp())
    assert not db.any()


def test_gradient_is_used_and_differentiated():
    """z = (dy/da) * b with y = a^2 b, so z = 2 a b^2, whose gradients the session gives as those of any operator."""
    nodes = [helper.make_node("Mul", ["a", "a"], ["q"]), helper.make_node("Mul", ["q", "b"], ["y"])]
    session = gradient(nodes, ["a", "b"], ["a"], "y", [helper.make_node("Mul", ["d0", "b"], ["z"])])
    (z,), run = session.forward([A, B], b"\1\1")
    torch.testing.assert_close(z, 2 * A * B * B, rtol=1e-13, atol=1e-13)
    saved = [[A, B][i] for i in run.saved_inputs] + [[z][i] for i in run.saved_outputs]
    da, db = run.backward(saved, [torch.ones(3, dtype=torch.float64)])
    torch.testing.assert_close(da, 2 * B * B, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(db, 4 * A * B, rtol=1e-13, atol=1e-13)


def test_a_second_gradient_of_recurrent_steps_is_refused():
    """Their gradient has no gradient of its own: it is named, and not taken for zero."""
    shapes = {"x": (3, 1, 2), "w": (1, 16, 2), "r": (1, 16, 4)}
    nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["h"], hidden_size=4), helper.make_node("Tanh", ["h"], ["y"]),
             helper.make_node("Gradient", ["x"], ["d"], domain=TRAINING, xs=["x"], y="y")]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info(name, TensorProto.DOUBLE, shape)
                                           for name, shape in shapes.items()], [ValueInfoProto(name="d")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(TRAINING, 1)]
    session = _C.Session(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    tensors = [torch.rand(shape, dtype=torch.float64) for shape in shapes.values()]
    (d,), _ = session.forward(tensors, b"\0\0\0")
    assert d.any()
    with pytest.raises(UnsupportedError, match="RecurrentStepsGrad"):
        session.forward(tensors, b"\1\1\1")


def test_errors_of_gradient():
    with pytest.raises(UnsupportedError, match="names 'q'"):
        node = helper.make_node("Gradient", ["a"], ["d"], domain=TRAINING, xs=["q"], y="y")
        graph = helper.make_graph([*MUL, node], "g", [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [3])
                                                      for n in "ab"],
                                  [ValueInfoProto(name="d")])
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(TRAINING, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        _C.Session(model.SerializeToString()).forward([A, B], b"\0\0")
    with pytest.raises(UnsupportedError, match="y 'nowhere'"):
        gradient(MUL, ["a", "b"], ["a"], "nowhere", []).forward([A, B], b"\0\0")
