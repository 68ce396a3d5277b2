"""Random numbers of nodes, runs and elements are independent, repeat with their seed, and are never folded."""

import math

import numpy as np
import torch
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from onnxtrain import _C


def model(nodes=1, ratio=0.3, training=True, mask=False, elem=TensorProto.FLOAT, opset=20):
    """`nodes` Dropouts side by side over one input x."""
    outputs = [f"y{i}" for i in range(nodes)] + [f"m{i}" for i in range(nodes) if mask]
    graph = helper.make_graph(
        [helper.make_node("Dropout", ["x", "ratio", "training"], [f"y{i}"] + ([f"m{i}"] if mask else []),
                          name=f"drop{i}")
         for i in range(nodes)], "drop", [helper.make_tensor_value_info("x", elem, None)],
        [ValueInfoProto(name=o) for o in outputs],
        [numpy_helper.from_array(np.array(ratio, np.float32), "ratio"),
         numpy_helper.from_array(np.array(training), "training")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)],
                                        ir_version=10).SerializeToString())


def masks(session, n, seed):
    """Masks of all nodes, as seen on ones."""
    outputs, _ = session.forward([torch.ones(n)], b"\0", seed)
    return [o != 0 for o in outputs]


def sigmas(successes, n, p):
    """How far a binomial count is from its mean, in standard deviations."""
    return abs(float(successes) - n * p) / math.sqrt(n * p * (1 - p))


def assert_independent(a, b, keep):
    n = a.numel()
    assert sigmas((a & b).sum(), n, keep * keep) < 5


def test_neighbours_are_independent():
    (m,) = masks(model(ratio=0.3), 400_000, 1)
    for lag in (1, 2, 3, 4, 8, 16, 32, 64, 256, 1024):
        assert_independent(m[:-lag], m[lag:], 0.7)


def test_nodes_are_independent():
    a, b, c = masks(model(nodes=3, ratio=0.3), 200_000, 9)
    for x, y in ((a, b), (a, c), (b, c)):
        assert_independent(x, y, 0.7)


def test_runs_are_independent_and_seeds_repeat():
    session = model(ratio=0.3)
    runs = [masks(session, 200_000, seed)[0] for seed in (1, 2, 3, 1 << 32, (1 << 64) - 1)]
    for i, x in enumerate(runs):
        for y in runs[:i]:
            assert_independent(x, y, 0.7)
    assert torch.equal(runs[0], masks(session, 200_000, 1)[0])
    assert torch.equal(runs[0], masks(model(ratio=0.3), 200_000, 1)[0])


def test_seed_and_node_do_not_trade_places():
    """Node i of run s must not draw what node j of another run draws."""
    session = model(nodes=3, ratio=0.5)
    all_masks = [m for seed in range(4) for m in masks(session, 4096, seed)]
    for i, x in enumerate(all_masks):
        for y in all_masks[:i]:
            assert not torch.equal(x, y)


def test_random_is_reported_and_never_folded():
    assert model().random
    constant = helper.make_graph(
        [helper.make_node("Dropout", ["x", "ratio", "training"], ["y"], name="drop")], "g", [],
        [ValueInfoProto(name="y")],
        [numpy_helper.from_array(np.ones(1000, np.float32), "x"),
         numpy_helper.from_array(np.array(0.5, np.float32), "ratio"),
         numpy_helper.from_array(np.array(True), "training")])
    made = helper.make_model(constant, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = _C.Session(made.SerializeToString())
    (a,), _ = session.forward([], b"", 1)
    (b,), _ = session.forward([], b"", 2)
    assert not torch.equal(a, b)
