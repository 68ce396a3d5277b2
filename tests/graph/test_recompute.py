"""What backward computes again instead of keeping it: the same bits in less memory,
by the rule of passes/evict.c.
"""

import copy
import hashlib
import os
import random

import numpy as np
import onnx
import pytest
import test_models
import torch
from onnx import helper
from seeds import drawn_seed
from test_fuse_elementwise import random_model

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule, _program

SEED = drawn_seed()
ZOO = {**test_models.MODELS, **{f"dropped-{name}": model for name, model in test_models.RANDOM.items()}}
ZOO = {name: model for name, model in ZOO.items() if model.engine}
SAMPLE = sorted(ZOO) if os.environ.get("ONNXTRAIN_SLOW") == "1" else sorted(random.Random(SEED).sample(sorted(ZOO), 4))

pytestmark = pytest.mark.usefixtures("kernels_by_rule")


@pytest.fixture(autouse=True)
def switches_as_they_were():
    yield
    _C.disable_passes([])
    _C.recompute_everywhere(False)


def run(model, tensors, wants=None, seed=7, level=0, parameters=b""):
    """(session, run's saved inputs, outputs and gradients as bytes) of one step in a session of its own."""
    session = _C.Session(model, recompute=level, parameters=parameters)
    outputs, run = session.forward(tensors, wants or b"\1" * len(tensors), seed)
    flat = [y for output in outputs if output is not None
            for y in (output if isinstance(output, (list, tuple)) else [output])]
    kept = [bits(y) for y in flat]
    if run is None:
        return session, (), kept
    torch.manual_seed(3)
    grads = [torch.randn(y.shape).to(y.dtype) if y.is_floating_point() else None for y in flat]
    saved = run.saved_inputs
    grads = run.backward([tensors[i] for i in saved] + [flat[i] for i in run.saved_outputs], grads)
    return session, saved, kept + [None if g is None else bits(g) for g in grads]


def bits(tensor):
    """What is compared: a digest, as pytest would take hours to show how millions of bytes differ."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(data).hexdigest()


def in_all_ways(model, tensors, **kwargs):
    """Without recomputation, with it, at its levels, and whatever that costs: stats by way, bits compared."""
    ways = {}
    for way in ("off", "rule", "layers", "segments", "everywhere"):
        _C.disable_passes(["recompute", "recompute_regions"] if way == "off" else [])
        _C.recompute_everywhere(way == "everywhere")
        session, _, got = run(model, tensors, level={"layers": 1, "segments": 2}.get(way, 0), **kwargs)
        ways[way] = session.stats()
        if way == "off":
            expected = got
            assert ways[way]["recomputed_nodes"] == 0
        assert got == expected, way
    for way in ("rule", "layers", "segments"):
        if ways[way]["recomputed_nodes"]:
            assert ways[way]["slab_bytes"] < ways["off"]["slab_bytes"] * 1.02, way
    return ways


def network(rows, width, layers=3, ratio=0.1):
    """Residual blocks of norm, product, GELU, dropout, product; (model, tensors)."""
    nodes, names, tensors, rng, x = [], [], [], np.random.default_rng(0), "x"

    def weight(name, *shape):
        names.append((name, shape))
        tensors.append(torch.from_numpy((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)))
        return name

    weight("x", rows, width)
    for i in range(layers):
        scale, bias = weight(f"scale{i}", width), weight(f"bias{i}", width)
        up, down = weight(f"up{i}", width, 4 * width), weight(f"down{i}", 4 * width, width)
        nodes += [
            helper.make_node("LayerNormalization", [x, scale, bias], [f"n{i}"], axis=-1),
            helper.make_node("MatMul", [f"n{i}", up], [f"h{i}"]),
            helper.make_node("Gelu", [f"h{i}"], [f"a{i}"], approximate="tanh"),
            helper.make_node("Dropout", [f"a{i}", "ratio", "on"], [f"d{i}"]),
            helper.make_node("MatMul", [f"d{i}", down], [f"o{i}"]),
            helper.make_node("Add", [x, f"o{i}"], [f"x{i}"]),
        ]
        x = f"x{i}"
    constants = [onnx.numpy_helper.from_array(np.array(ratio, np.float32), "ratio"),
                 onnx.numpy_helper.from_array(np.array(True), "on")]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in names]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name=x)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                             ir_version=10).SerializeToString(), tensors


def test_a_block_keeps_neither_norm_nor_activation():
    ways = in_all_ways(*network(256, 1024, layers=4))
    off, rule, layers = ways["off"], ways["rule"], ways["layers"]
    per_layer = 256 * 1024 * 4
    # A norm, a GELU and a dropout in each block but the last, where backward begins at once.
    assert rule["recomputed_nodes"] >= 9
    assert rule["recomputed_bytes"] >= 3 * (per_layer + 4 * per_layer)  # n and d; a was not kept before
    assert rule["slab_bytes"] <= off["slab_bytes"] - 2 * 5 * per_layer
    assert layers["recomputed_bytes"] > rule["recomputed_bytes"] and layers["slab_bytes"] < rule["slab_bytes"]
    for stats in ways.values():
        assert stats["slab_bytes"] <= 1.05 * stats["slab_lower_bound"]


def test_the_copies_stand_in_backward_before_their_reader():
    model, tensors = network(256, 1024, layers=2)
    session, saved, _ = run(model, tensors)
    forward, backward = session.text("program").split("# backward")
    assert forward.count("LayerNormalization") == backward.count("LayerNormalization") == 2
    assert forward.count("Gelu") == 2 and "Gelu" in backward
    # Of the first block, behind the last one's.
    assert backward.index("LayerNormGrad") < backward.rindex("LayerNormalization")
    _C.disable_passes(["recompute"])
    plain, before, _ = run(model, tensors)
    assert "LayerNormalization" not in plain.text("program").split("# backward")[1]
    biases = {i for i, (name, *_) in enumerate(session.inputs) if name.startswith("bias")}
    assert set(saved) - set(before) <= biases  # nothing else has to stay as it is for longer


def test_small_programs_are_left_alone():
    session, _, _ = run(*network(64, 32))
    assert session.stats()["recomputed_nodes"] == 0
    _C.recompute_everywhere(True)
    session, _, _ = run(*network(64, 32))
    assert session.stats()["recomputed_nodes"] > 0


def test_an_input_that_eager_would_not_keep_is_not_kept():
    """Of a sum backward needs nothing under eager, so its operands may be changed meanwhile."""
    nodes = [helper.make_node("Add", ["x", "y"], ["s"]), helper.make_node("MatMul", ["s", "w"], ["p"]),
             helper.make_node("Tanh", ["p"], ["t"]), helper.make_node("MatMul", ["t", "w"], ["q"])]
    shapes = {"x": (4096, 512), "y": (4096, 512), "w": (512, 512)}
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name="q")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    tensors = [torch.randn(shape) for shape in shapes.values()]
    for level in (0, 1):
        session, saved, _ = run(model, tensors, level=level)
        assert (session.stats()["recomputed_nodes"] > 0) == bool(level)
        assert saved == ((0, 1, 2) if level else (2,))


def layers_in_half(layers=4, width=1024, rows=2048):
    """Linear layers of weights that are rounded to bfloat16 first, as autocast does; (model, tensors, parameters)."""
    shapes = {"x": (rows, width), **{f"w{i}": (width, width) for i in range(layers)}}
    nodes, at = [helper.make_node("Cast", ["x"], ["h0"], to=onnx.TensorProto.BFLOAT16)], "h0"
    for i in range(layers):
        nodes += [helper.make_node("Cast", [f"w{i}"], [f"n{i}"], to=onnx.TensorProto.BFLOAT16),
                  helper.make_node("MatMul", [at, f"n{i}"], [f"p{i}"]), helper.make_node("Tanh", [f"p{i}"], [f"t{i}"])]
        at = f"t{i}"
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name=at)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    generator = torch.Generator().manual_seed(SEED)
    tensors = [torch.randn(shape, generator=generator) * shape[0] ** -0.5 for shape in shapes.values()]
    return model, tensors, bytes([name != "x" for name in shapes])


def reads_in_backward(session):
    """Of each weight of layers_in_half(), how many nodes of backward read the parameter alone."""
    backward = session.text("program").partition("# backward")[2]
    return [backward.count(f"(w{i})") for i in range(4)]


def test_a_weight_in_16_bits_is_not_kept():
    """Its parameter is there in backward anyway. What else is rounded may be written meanwhile, as under eager."""
    model, tensors, parameters = layers_in_half()
    weight = tensors[1].numel() * 2
    session, saved, _ = run(model, tensors)
    before = session.stats()
    assert reads_in_backward(session) == [0, 0, 0, 0]
    assert saved == ()
    session, saved, _ = run(model, tensors, parameters=parameters)
    after = session.stats()
    assert saved == (1, 2, 3, 4)
    assert reads_in_backward(session) == [1, 1, 1, 1]
    if "(h0, n0)" in session.text("program"):  # products of 16 bits
        assert after["recomputed_nodes"] == before["recomputed_nodes"] + 4
        assert after["recomputed_bytes"] == before["recomputed_bytes"] + 4 * weight
    else:  # each weight is rounded, and cast back to float32
        assert after["recomputed_nodes"] == before["recomputed_nodes"] + 8
        assert after["recomputed_bytes"] >= before["recomputed_bytes"] + 4 * weight
    assert after["kept_bytes"] <= before["kept_bytes"] - 4 * weight
    assert after["slab_bytes"] <= before["slab_bytes"] - 3 * weight
    in_all_ways(model, tensors, parameters=parameters)


def test_a_weight_that_changes_before_backward_is_found():
    torch.manual_seed(SEED)
    layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
    model, x = ORTModule(torch.nn.Sequential(*layers)), torch.randn(2048, 1024)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    with torch.no_grad():
        layers[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().sum().backward()
    for layer in layers:
        assert layer.weight.grad.isfinite().all() and layer.weight.grad.any()


def test_the_arguments_are_checked():
    with pytest.raises(ValueError, match="recompute is 3, expected 0 to 2"):
        _C.Session(network(8, 8)[0], recompute=3)
    with pytest.raises(ValueError, match="parameters has 2 bytes, expected one for each of the graph's 13 inputs"):
        _C.Session(network(8, 8)[0], parameters=b"\1\0")


@pytest.mark.parametrize("index", range(8))
def test_random_graphs(index):
    model, names = random_model(random.Random(SEED + index))
    generator = torch.Generator().manual_seed(SEED + index)
    in_all_ways(model, [torch.randn(shape, generator=generator) * (0.1 if name == "w" else 1) for name, shape in names])


def test_a_long_chain_takes_no_more_copies_than_there_is_room_for():
    """In the least memory each gradient would begin at the front again, which is more copies than the table of
    passes/evict.c has: a higher limit is found, and nothing is written behind the table.
    """
    nodes = [helper.make_node("Sin", [f"h{i}"], [f"h{i + 1}"]) for i in range(150)]
    graph = helper.make_graph(nodes, "chain", [helper.make_tensor_value_info("h0", 1, [8, 64])],
                              [helper.make_tensor_value_info("h150", 1, [8, 64])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    ways = in_all_ways(model, [torch.linspace(-1, 1, 512).view(8, 64)])
    assert ways["everywhere"]["recomputed_nodes"] > 150


class Recorder:
    """Stands for _C.Session and notes the calls of forward."""

    calls: list = []

    def __init__(self, model, *args, **kwargs):
        self._model, self._session = model, SESSION(model, *args, **kwargs)
        self._parameters = kwargs["parameters"]

    def __getattr__(self, name):
        return getattr(self._session, name)

    def forward(self, tensors, mask, seed=0):
        self.calls.append((self._model, [t.detach().clone() for t in tensors], mask, seed, self._parameters))
        return self._session.forward(tensors, mask, seed)


SESSION = _C.Session


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SAMPLE)
def test_models(name, bf16, monkeypatch):
    monkeypatch.setattr(_program._C, "Session", Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    torch.manual_seed(0)
    model, data = ORTModule(copy.deepcopy(ZOO[name].make()).train()), ZOO[name].data()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model(*data)
    calls = Recorder.calls
    monkeypatch.undo()
    assert calls
    for proto, tensors, mask, seed, parameters in calls:
        for stats in in_all_ways(proto, tensors, wants=mask, seed=seed, parameters=parameters).values():
            assert stats["slab_bytes"] <= 1.05 * stats["slab_lower_bound"] + 4096


def test_backward_reads_16_bits_in_place_of_float32():
    """Values of a gate between two bfloat16 products."""
    torch.manual_seed(0)
    tensors = [torch.randn(*shape).bfloat16() for shape in ((512, 64), (64, 1024), (1024, 64))]
    nodes = [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("Sigmoid", ["h"], ["s"]),
             helper.make_node("Mul", ["h", "s"], ["g"]), helper.make_node("MatMul", ["g", "b"], ["y"])]
    graph = helper.make_graph(nodes, "gate", [
        helper.make_tensor_value_info(name, onnx.TensorProto.BFLOAT16, list(each.shape))
        for name, each in zip("xab", tensors, strict=True)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.BFLOAT16, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    found = {}
    for off in (["recompute"], ["recompute", "keep_narrow"]):
        _C.disable_passes(off)
        session, _, results = run(model, tensors)
        found[len(off)] = results, session.stats()["slab_bytes"]
    assert found[1][0] == found[2][0]
    assert found[1][1] < 0.8 * found[2][1]
