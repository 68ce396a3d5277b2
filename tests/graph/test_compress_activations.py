"""Activations that backward reads in fewer bytes: which ones, what the program is then, and how far gradients are off."""

import copy
import random

import numpy as np
import onnx
import pytest
import torch
import torch.nn as nn
from harness import failing_allocations
from onnx import helper
from seeds import drawn_seed
from test_fuse_elementwise import random_model
from test_recompute import network

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

SEED = drawn_seed()
BF16, INT8 = 16, 3
ROWS, WIDTH = 128, 256  # more than the least number of elements


@pytest.fixture(autouse=True)
def switches_as_they_were():
    yield
    _C.disable_passes([])
    _C.recompute_everywhere(False)


def step(model, tensors, kept, seed=7, **kwargs):
    """(session, outputs, gradients) of one step."""
    session = _C.Session(model, kept=kept, **kwargs)
    outputs, run = session.forward(tensors, bytes([t.is_floating_point() for t in tensors]), seed)
    torch.manual_seed(3)
    grads = [torch.randn(y.shape) if y.is_floating_point() else None for y in outputs]
    given = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    return session, outputs, run.backward(given, grads)


def graph_of(nodes, outputs, weights=(), constants=()):
    """(model, tensors): x of ROWS and WIDTH, and square weights."""
    rng = np.random.default_rng(1)
    names = [("x", (ROWS, WIDTH)), *[(name, (WIDTH, WIDTH)) for name in weights]]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in names]
    made = [helper.make_node(op, inputs, results, **attrs) for op, inputs, results, attrs in nodes]
    graph = helper.make_graph(made, "g", values, [onnx.ValueInfoProto(name=name) for name in outputs],
                              [onnx.numpy_helper.from_array(np.array(value), name) for name, value in constants])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    return model, [torch.from_numpy((rng.normal(size=shape) / 8).astype(np.float32)) for _, shape in names]


def error(got, want):
    """The largest of the gradients' errors, relative to each one's norm."""
    return max([((g - w).norm() / w.norm()).item() for g, w in zip(got, want) if w is not None and w.norm() > 0])


LAYERS = [("MatMul", ["x", "v"], ["h"], {}), ("Tanh", ["h"], ["t"], {}), ("MatMul", ["t", "w"], ["y"], {})]


def names_and_operators(text):
    """Operators of the program, of forward and of backward, without shapes."""
    lines = [line.split(" = ", 1)[1].split(" ")[0].split(".")[-1] for line in text.splitlines() if " = " in line]
    return lines


@pytest.mark.parametrize("kept, inner", [
    (0, ["TanhGrad"]), (BF16, ["Cast", "TanhGrad"]), (INT8, ["DequantizeActivation", "TanhGrad"])])
def test_the_program_before_and_after(kept, inner):
    model, tensors = graph_of(LAYERS, ["y"], ["v", "w"])
    _C.disable_passes(["recompute", "fuse_elementwise"])
    session, _, _ = step(model, tensors, kept)
    forward, backward = session.text("program").split("# backward")
    stored = {0: [], BF16: ["Cast"], INT8: ["QuantizeActivation"]}[kept]
    assert names_and_operators(forward.split("{\n", 1)[1]) == ["MatMul", "Tanh", "MatMul", *stored]
    got = names_and_operators(backward)
    assert sorted(got) == sorted(["FusedMatMul"] * 4 + inner)
    stats, size = session.stats(), ROWS * WIDTH
    assert (stats["compressed_values"], stats["compressed_from"]) == ((1, 4 * size) if kept else (0, 0))
    assert stats["compressed_bytes"] == {0: 0, BF16: 2 * size, INT8: size + 4 * size // 256}[kept]
    assert stats["kept_bytes"] == (stats["compressed_bytes"] if kept else 4 * size)


@pytest.mark.parametrize("kept", [BF16, INT8])
@pytest.mark.parametrize("case, nodes, outputs", [
    ("a divisor", [("Abs", ["x"], ["a"], {}), ("Add", ["a", "one"], ["b"], {}), ("Div", ["x", "b"], ["y"], {})], "y"),
    ("a logarithm", [("Exp", ["x"], ["e"], {}), ("Log", ["e"], ["y"], {})], "y"),
    ("what is compared", [("Tanh", ["x"], ["t"], {}), ("ReduceMax", ["t", "axes"], ["y"], {})], "y"),
    ("a result", [*LAYERS], "yt"),
    ("an input", [("MatMul", ["x", "v"], ["y"], {})], "y"),
])
def test_what_stays(kept, case, nodes, outputs):
    model, tensors = graph_of(nodes, outputs, ["v", "w"] if "v" in str(nodes) else [],
                              [("one", np.float32(1)), ("axes", np.array([1]))])
    _C.disable_passes(["recompute"])
    session, outputs, gradients = step(model, tensors, kept)
    assert session.stats()["compressed_values"] == 0
    _, expected, exact = step(model, tensors, 0)
    assert all(torch.equal(a, b) for a, b in zip([*outputs, *gradients], [*expected, *exact]) if b is not None)


def test_small_values_stay():
    model, _ = graph_of(LAYERS, ["y"], ["v", "w"])
    proto = onnx.load_model_from_string(model)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16384 // WIDTH - 1
    session, _, _ = step(proto.SerializeToString(), [torch.randn(63, WIDTH), *[torch.randn(WIDTH, WIDTH)] * 2], INT8)
    assert session.stats()["compressed_values"] == 0


@pytest.mark.parametrize("kept, bound", [(BF16, 0.01), (INT8, 0.03)])
@pytest.mark.parametrize("level, budget", [(0, 0), (1, 0), (2, 0), (0, 0.6)])
def test_a_network_with_dropout(kept, bound, level, budget):
    model, tensors = network(512, 64, 4)
    exact, outputs, want = step(model, tensors, 0, recompute=level, budget=budget)
    session, same, got = step(model, tensors, kept, recompute=level, budget=budget)
    assert all(torch.equal(a, b) for a, b in zip(same, outputs))
    assert 0 < error(got, want) < bound
    if not level and not budget:
        stats = session.stats()
        assert stats["compressed_bytes"] < {BF16: 0.51, INT8: 0.26}[kept] * stats["compressed_from"]
        assert stats["slab_bytes"] < {BF16: 0.75, INT8: 0.62}[kept] * exact.stats()["slab_bytes"]
    again = step(model, tensors, kept, recompute=level, budget=budget)[2]
    assert all(torch.equal(a, b) for a, b in zip(got, again) if b is not None)


def is_well_conditioned(model, tensors, exact):
    """Whether each gradient is more than rounding, and follows from values that are only about right: with inputs that
    are off by a part in 128, it is off by less than a fourth of what the test below allows."""
    generator = torch.Generator().manual_seed(1)
    near = [x * (1 + torch.randn(x.shape, generator=generator) / 128) for x in tensors]
    finite = [(g, w) for g, w in zip(step(model, near, 0)[2], exact) if w is not None and w.isfinite().all()]
    largest = max([want.norm() for _, want in finite], default=0)
    return all((got - want).norm() <= 0.05 * want.norm() and want.norm() > 1e-6 * largest for got, want in finite)


@pytest.mark.parametrize("number", range(60))
def test_random_graphs(number):
    rng = np.random.default_rng(number)
    for attempt in range(100):
        model, names = random_model(random.Random(SEED + number + 1000 * attempt))
        tensors = [torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for _, shape in names]
        _C.disable_passes([])
        exact = step(model, tensors, 0)
        if is_well_conditioned(model, tensors, exact[2]):
            break
    else:
        pytest.fail("no graph is well conditioned")
    _C.recompute_everywhere(True)
    _C.disable_passes(["recompute"])
    for kept in (BF16, INT8):
        session, outputs, gradients = step(model, tensors, kept)
        assert all(torch.equal(a, b) for a, b in zip(outputs, exact[1]))
        finite = [(g, w) for g, w in zip(gradients, exact[2]) if w is not None and w.isfinite().all()]
        rounding = 1e-5 * max([want.norm() for _, want in finite], default=0)  # of gradients that cancel
        for got, want in finite:
            assert (got - want).norm() <= 0.2 * want.norm() + rounding, (kept, session.text("program"))


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                                    nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.Flatten(2))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        h = self.layers(x).transpose(1, 2)
        return self.attention(h, h, h, need_weights=False)[0]


@pytest.mark.parametrize("kept, bound", [("bf16", 0.02), ("int8", 0.06)])
def test_the_variable(kept, bound, monkeypatch, caplog):
    torch.manual_seed(0)
    eager, x = Convolutional(), torch.randn(4, 3, 16, 16)
    monkeypatch.setenv("ORTMODULE_ACTIVATION_COMPRESSION", kept)
    ours = ORTModule(copy.deepcopy(eager))
    want, got = eager(x), ours(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 1, want.numel()).view_as(want)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    scale = max(p.grad.norm() for p in eager.parameters())
    for (name, p), q in zip(eager.named_parameters(), ours.parameters()):
        assert (q.grad - p.grad).norm() <= bound * p.grad.norm() + 1e-5 * scale, name
    assert "Activation compression       ON" in caplog.text


@pytest.mark.parametrize("kept, bound", [("bf16", 0.01), ("int8", 0.05)])
def test_signs_are_those_of_forward(kept, bound):
    """A gradient through ReLU is off by all of it where an approximation has another sign, as the result of a norm would
    have that is recomputed from what is stored."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, channels in zip((3, 16, 32, 32), (16, 32, 32, 32)):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    x, labels, gradients = torch.randn(8, 3, 32, 32), torch.arange(8), []
    for compression in ("", kept):
        model = ORTModule(copy.deepcopy(net))
        model._runtime.activation_compression = compression
        nn.functional.cross_entropy(model(x), labels).backward()
        gradients.append([p.grad for p in model.parameters()])
    rounding = 1e-4 * max(g.norm() for g in gradients[0])  # of biases in front of a norm, whose gradients cancel
    for exact, got in zip(*gradients):
        assert (got - exact).norm() <= bound * exact.norm() + rounding


def test_other_types_are_refused():
    model, _ = graph_of(LAYERS, ["y"], ["v", "w"])
    with pytest.raises(ValueError, match="kept is 7"):
        _C.Session(model, kept=7)


def test_without_memory():
    model, tensors = network(512, 64, 1)

    def build():
        step(model, tensors, INT8)

    failing_allocations(build)
