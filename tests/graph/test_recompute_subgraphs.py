"""Subgraphs that the caller names run again in backward: their values are not kept, with the same bits."""

import numpy as np
import onnx
import pytest
import torch
from harness import failing_allocations
from onnx import helper
from seeds import drawn_seed
from test_recompute import bits, layers_in_half, network
from test_recompute_regions import marked

from onnxtrain import _C

pytestmark = pytest.mark.usefixtures("kernels_by_rule")
SEED = drawn_seed()
LAYERS, ROWS, WIDTH = 4, 256, 128
UNIT = ROWS * WIDTH * 4
EACH = {"LayerNormalization+": UNIT, "MatMul+": 4 * UNIT, "Gelu+Dropout+": 4 * UNIT}  # of one layer of network()


def run(model, tensors, subgraphs=(), seed=7):
    session = _C.Session(model, subgraphs=subgraphs)
    outputs, run = session.forward(tensors, b"\1" * len(tensors), seed)
    kept = [bits(y) for y in outputs]
    torch.manual_seed(3)
    grads = [torch.randn(y.shape).to(y.dtype) for y in outputs]
    grads = run.backward([tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs], grads)
    return session, kept + [None if g is None else bits(g) for g in grads]


def clusters(session):
    return {(subgraph, compromise): numbers for subgraph, compromise, *numbers in session.subgraphs()}


def test_the_subgraphs_of_a_network():
    session, _ = run(*network(ROWS, WIDTH, LAYERS))
    found = clusters(session)
    for subgraph, size in EACH.items():
        assert found[subgraph, False] == [LAYERS, 0, LAYERS * size], subgraph
    assert session.stats()["recomputed_nodes"] == 0
    session.forward([t.clone() for t in network(ROWS, WIDTH, LAYERS)[1]], bytes(13 + 4 * (LAYERS - 3)), 7)
    assert not session.subgraphs()  # of a program without a backward


@pytest.mark.parametrize("subgraph", EACH)
@pytest.mark.parametrize("count", [-1, 0, 1, 3])
def test_the_first_so_many_run_again(subgraph, count):
    model, tensors = network(ROWS, WIDTH, LAYERS)
    plain, expected = run(model, tensors)
    session, got = run(model, tensors, [(subgraph, False, count)])
    assert got == expected
    applied = LAYERS if count < 0 else count
    assert clusters(session)[subgraph, False] == [LAYERS, applied, LAYERS * EACH[subgraph]]
    before, after = plain.stats(), session.stats()
    assert after["recomputed_bytes"] == applied * EACH[subgraph]
    assert after["recomputed_nodes"] == applied * subgraph.count("+")
    assert after["kept_bytes"] == before["kept_bytes"] - applied * EACH[subgraph]


def test_all_of_them_together():
    """Copies read each other's results, and run once."""
    model, tensors = network(ROWS, WIDTH, LAYERS)
    plain, expected = run(model, tensors)
    session, got = run(model, tensors, [(subgraph, False, -1) for subgraph in EACH])
    assert got == expected
    assert session.stats()["recomputed_nodes"] == 4 * LAYERS
    assert session.stats()["kept_bytes"] == plain.stats()["kept_bytes"] - LAYERS * sum(EACH.values())
    assert session.stats()["slab_bytes"] < 0.7 * plain.stats()["slab_bytes"]


def test_beside_regions():
    model, tensors = network(ROWS, WIDTH, LAYERS)
    _, expected = run(model, tensors)
    half = marked(model, lambda place, node: f"{place // 6}/" if place < 12 else "")
    session, got = run(half, tensors, [("Gelu+Dropout+", False, -1)])
    assert got == expected
    assert clusters(session)["Gelu+Dropout+", False][:2] == [LAYERS - 2, LAYERS - 2]
    assert session.stats()["recomputed_nodes"] == 2 * 4 + 2 * 2


def test_a_compromise_keeps_the_narrow_operand():
    """LSTM's result in bfloat16 cannot run again by itself; what is cast from it can, also without being asked for."""
    shapes = {"x": (32, 8, 64), "w": (1, 256, 64), "r": (1, 256, 64)}
    nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=64),
             helper.make_node("Cast", ["y"], ["n"], to=onnx.TensorProto.BFLOAT16),
             helper.make_node("TopK", ["n", "k"], ["t", ""]),
             helper.make_node("Cast", ["t"], ["f"], to=onnx.TensorProto.FLOAT),
             helper.make_node("Mul", ["f", "f"], ["s"])]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name="s")],
                              [onnx.numpy_helper.from_array(np.array([32], np.int64), "k")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    generator = torch.Generator().manual_seed(SEED)
    tensors = [torch.randn(shape, generator=generator) * 0.1 for shape in shapes.values()]
    _C.disable_passes(["recompute"])
    unasked, _ = run(model, tensors)
    _C.disable_passes(["recompute", "keep_narrow"])
    try:
        plain, expected = run(model, tensors)
        assert ("Cast+", True) in clusters(plain)
        session, got = run(model, tensors, [("Cast+", True, -1)])
    finally:
        _C.disable_passes([])
    assert got == expected
    saved = clusters(plain)["Cast+", True][2]
    assert session.stats()["kept_bytes"] == plain.stats()["kept_bytes"] - saved < plain.stats()["kept_bytes"]
    assert unasked.stats()["kept_bytes"] == session.stats()["kept_bytes"]


def test_weights_in_half():
    model, tensors, _ = layers_in_half(2, 128, 64)
    _, expected = run(model, tensors)
    for subgraph, compromise, *_ in run(model, tensors)[0].subgraphs():
        assert run(model, tensors, [(subgraph, compromise, -1)])[1] == expected


def test_the_argument_is_checked():
    model, _ = network(8, 8)
    for wrong, error in (([1], TypeError), ([("Gelu+", False)], TypeError), (1, TypeError),
                         ([("Gelu+", False, "x")], TypeError)):
        with pytest.raises(error):
            _C.Session(model, subgraphs=wrong)


def test_failing_allocations():
    model, tensors = network(8, 16, 2)
    subgraphs = [(subgraph, False, -1) for subgraph in EACH]
    _, expected = run(model, tensors, subgraphs)
    assert failing_allocations(lambda: run(model, tensors, subgraphs)[1]) == expected
