"""Regions of torch.utils.checkpoint: backward keeps what leaves them and runs the rest again, with the same bits."""

import copy
import random

import onnx
import pytest
import torch
from harness import failing_allocations
from onnx import helper
from seeds import drawn_seed
from test_fuse_elementwise import random_model
from test_recompute import ZOO, Recorder, network, run

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule, _program

SEED = drawn_seed()
MODELS = random.Random(SEED).sample(sorted(ZOO), 4)

pytestmark = pytest.mark.usefixtures("kernels_by_rule")


@pytest.fixture(autouse=True)
def passes_as_they_were():
    yield
    _C.disable_passes([])


def marked(model, region_of):
    """The model with metadata "onnxtrain.region" at each node: what `region_of` has for its place and itself."""
    proto = onnx.load_model_from_string(model)
    for place, node in enumerate(proto.graph.node):
        del node.metadata_props[:]
        if region := region_of(place, node):
            node.metadata_props.add(key="onnxtrain.region", value=region)
    return proto.SerializeToString()


def off_and_on(model, tensors, **kwargs):
    """Stats without the pass and with it; outputs and gradients have the same bits."""
    _C.disable_passes(["recompute_regions"])
    off, _, expected = run(model, tensors, **kwargs)
    _C.disable_passes([])
    on, _, got = run(model, tensors, **kwargs)
    assert got == expected
    return off.stats(), on.stats()


def blocks(layers, region_of_layer, rows=256, width=1024):
    """network() with the nodes of each layer in a region."""
    model, tensors = network(rows, width, layers)
    return marked(model, lambda place, node: region_of_layer(place // 6)), tensors


def test_backward_keeps_the_inputs_of_blocks():
    layers, block = 8, 256 * 1024 * 4
    off, on = off_and_on(*blocks(layers, lambda layer: f"{layer}/"))
    assert off["kept_bytes"] > layers * 5 * block  # a norm's input, and four times as much of each MLP
    assert on["kept_bytes"] <= (layers - 1) * block + 4096  # the first one's is an input of the graph
    # One block's interior, with its gradient, and what lies between the blocks.
    assert on["slab_bytes"] <= (layers - 1) * block + 14 * block
    assert on["slab_bytes"] < 0.5 * off["slab_bytes"]
    assert on["recomputed_nodes"] == layers * 4  # neither the second product nor the sum: nothing reads them again
    assert on["recomputed_bytes"] >= layers * 5 * block
    assert 0.1 < on["recomputed_share"] < 0.4


def test_a_region_leaves_the_rest_to_the_level():
    model, tensors = blocks(4, lambda layer: "1/" if layer == 1 else "")
    off, rule = off_and_on(model, tensors)
    assert off["recomputed_nodes"] < rule["recomputed_nodes"]
    for level in (1, 2):
        _, on = off_and_on(model, tensors, level=level)
        assert on["recomputed_nodes"] > rule["recomputed_nodes"]
        assert on["slab_bytes"] < 0.9 * rule["slab_bytes"]


def test_nested_regions_run_again_one_by_one():
    """The outer one keeps what lies between the inner ones while it runs again, and each of these runs once more."""
    flat = off_and_on(*blocks(8, lambda layer: f"{layer // 4}/"))[1]
    nested = off_and_on(*blocks(8, lambda layer: f"{layer // 4}/{layer}/"))[1]
    single = off_and_on(*blocks(8, lambda layer: f"{layer}/"))[1]
    assert nested["kept_bytes"] == flat["kept_bytes"] < single["kept_bytes"]
    assert nested["slab_bytes"] < 0.6 * flat["slab_bytes"]
    # In each outer one three of four layers as a whole, and every layer but for its last two nodes.
    assert nested["recomputed_nodes"] == 2 * (3 * 6 + 4 * 4)
    assert flat["recomputed_nodes"] == 2 * (3 * 6 + 4)


def test_regions_nested_deeper_than_the_pass_tells_apart():
    deep = "".join(f"{i}/" for i in range(20))
    off_and_on(*blocks(4, lambda layer: f"{deep}{layer}/"))


def test_what_leaves_a_region_is_kept():
    """A value that a later node or the caller reads, through a view too."""
    shapes = {"x": (512, 256), "w": (256, 256)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["b"]),
             helper.make_node("Reshape", ["b", "flat"], ["c"]), helper.make_node("Exp", ["c"], ["d"]),
             helper.make_node("Reshape", ["d", "square"], ["e"]), helper.make_node("MatMul", ["e", "w"], ["f"]),
             helper.make_node("Sigmoid", ["f"], ["g"])]
    constants = [helper.make_tensor("flat", onnx.TensorProto.INT64, [1], [-1]),
                 helper.make_tensor("square", onnx.TensorProto.INT64, [2], [-1, 256])]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    tensors = [torch.randn(shape) * 0.1 for shape in shapes.values()]
    block = 512 * 256 * 4
    # The product outside reads d; what the caller has as well is no part of the slab.
    for outputs, kept, recomputed in (("g", 1, 2), ("gb", 1, 0), ("gc", 1, 0), ("gd", 0, 2)):
        graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name=name) for name in outputs], constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        model = marked(model.SerializeToString(), lambda place, node: "1/" if place < 5 else "")
        off, on = off_and_on(model, tensors)
        assert on["kept_bytes"] == kept * block, outputs
        assert on["recomputed_nodes"] == recomputed, outputs


def test_the_metadata_survives_a_file():
    model, tensors = blocks(4, lambda layer: f"{layer}/")
    session, _, expected = run(model, tensors)
    again, _, got = run(session.save("post_processed"), tensors)
    assert got == expected
    assert again.stats()["recomputed_nodes"] == session.stats()["recomputed_nodes"] == 16


@pytest.mark.parametrize("index", range(12))
def test_random_graphs(index):
    rng = random.Random(SEED + index)
    print(f"ONNXTRAIN_TEST_SEED={SEED} graph {index}")
    model, names = random_model(rng)
    generator = torch.Generator().manual_seed(SEED + index)
    tensors = [torch.randn(shape, generator=generator) * (0.1 if name == "w" else 1) for name, shape in names]
    off_and_on(marked(model, lambda place, node: randomly(rng)), tensors)


def randomly(rng):
    return "".join(f"{rng.randrange(2)}/" for _ in range(rng.randrange(4)))


@pytest.mark.parametrize("name", MODELS)
def test_models(name, monkeypatch):
    """Any node in any region, of whole models: the same bits."""
    monkeypatch.setattr(_program._C, "Session", Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    torch.manual_seed(0)
    model, data = ORTModule(copy.deepcopy(ZOO[name].make()).train()), ZOO[name].data()
    model(*data)
    calls = Recorder.calls
    monkeypatch.undo()
    rng = random.Random(SEED)
    assert calls
    for proto, tensors, mask, seed, parameters in calls:
        for region_of in (lambda place, node: "1/", lambda place, node: f"{place // 10}/",
                          lambda place, node: randomly(rng)):
            off_and_on(marked(proto, region_of), tensors, wants=mask, seed=seed, parameters=parameters)


def test_failing_allocations():
    model, tensors = blocks(2, lambda layer: f"0/{layer}/", rows=8, width=16)
    _, _, expected = run(model, tensors)
    assert failing_allocations(lambda: run(model, tensors)[2]) == expected
