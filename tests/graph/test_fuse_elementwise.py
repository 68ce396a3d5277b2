"""Elementwise nodes that feed each other become one node; the numbers stay those of the nodes one by one."""

import random

import onnx
import pytest
import torch
from onnx import helper
from seeds import drawn_seed

from onnxtrain import _C

SEED = drawn_seed()
UNARY = ("Tanh", "Sigmoid", "Relu", "Neg", "Abs", "Softplus", "Gelu", "Sin")
BINARY = ("Add", "Sub", "Mul", "Min", "Max", "Sum")
SHAPES = ((3, 5, 64), (64,), (5, 64), (3, 1, 1), (), (3, 5, 1))


@pytest.fixture(autouse=True)
def passes_as_they_were():
    yield
    _C.disable_passes([])


def model_of(nodes, inputs, outputs, dtype=onnx.TensorProto.FLOAT):
    values = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name=name) for name in outputs])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def step(model, tensors, seed=7, wants=None):
    """Outputs and gradients of a session, and the text of its program."""
    session = _C.Session(model)
    torch.manual_seed(seed)
    outputs, run = session.forward(tensors, wants or b"\1" * len(tensors), seed)
    if run is None:
        return outputs, session.text("program")
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    grads = run.backward(saved, [torch.full_like(y, 0.5) for y in outputs])
    return [*outputs, *grads], session.text("program")


def both(model, tensors, **kwargs):
    _C.disable_passes(["fuse_elementwise"])
    apart, plain = step(model, tensors, **kwargs)
    _C.disable_passes([])
    fused, text = step(model, tensors, **kwargs)
    assert "FusedElementwise" not in plain
    for expected, got in zip(apart, fused, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    return text


def random_model(rng):
    """A graph of elementwise nodes, and of products, sums and softmaxes between them that a group must not close
    around.
    """
    names = [(f"in{i}", rng.choice(SHAPES) if i else SHAPES[0]) for i in range(4)]
    nodes, full, loose = [], ["in0"], [name for name, _ in names[1:]]
    weights = ("w", (64, 64))
    for i in range(rng.randrange(5, 30)):
        kind, name, x = rng.random(), f"v{i}", rng.choice(full)
        if kind < 0.3:
            nodes.append(helper.make_node(rng.choice(UNARY), [x], [name]))
        elif kind < 0.65:
            pair = [x, rng.choice(full + loose)]
            rng.shuffle(pair)
            nodes.append(helper.make_node(rng.choice(BINARY), pair, [name]))
        elif kind < 0.75:
            nodes.append(helper.make_node("Greater", [x, rng.choice(full)], [name + "c"]))
            nodes.append(helper.make_node("Where", [name + "c", rng.choice(full), rng.choice(full + loose)], [name]))
        elif kind < 0.8:
            nodes.append(helper.make_node("Dropout", [x, "ratio", "training"], [name]))
        elif kind < 0.9:
            nodes.append(helper.make_node("MatMul", [x, "w"], [name]))
        elif kind < 0.95:
            nodes.append(helper.make_node("Softmax", [x], [name], axis=-1))
        else:
            nodes.append(helper.make_node("ReduceMean", [x, "axes"], [name + "m"], keepdims=1))
            nodes.append(helper.make_node("Sub", [x, name + "m"], [name]))
        full.append(name)
    constants = [helper.make_node("Constant", [], [output], value=helper.make_tensor(*value))
                 for output, *value in (("ratio", "r", onnx.TensorProto.FLOAT, [], [0.25]),
                                        ("training", "t", onnx.TensorProto.BOOL, [], [True]),
                                        ("axes", "a", onnx.TensorProto.INT64, [1], [-1]))]
    outputs = list(dict.fromkeys([full[-1], rng.choice(full[1:])]))
    return model_of(constants + nodes, [*names, weights], outputs), [*names, weights]


@pytest.mark.parametrize("number", range(60))
def test_random_graphs(number):
    rng = random.Random(SEED + number)
    print(f"ONNXTRAIN_TEST_SEED={SEED} graph {number}")
    model, names = random_model(rng)
    generator = torch.Generator().manual_seed(SEED + number)
    tensors = [torch.randn(shape, generator=generator) * (0.1 if name == "w" else 1) for name, shape in names]
    both(model, tensors)


def test_a_chain_is_one_node():
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Gelu", ["a"], ["g"]),
             helper.make_node("Mul", ["g", "x"], ["y"])]
    text = both(model_of(nodes, [("x", (4, 128)), ("b", (128,))], ["y"]), [torch.randn(4, 128), torch.randn(128)])
    assert text.count("Add Gelu Mul") == 1 and "= Gelu" not in text and "= Mul" not in text


def test_no_cycle_through_a_node_outside():
    """y needs a directly and through the product of it: one group of both adds would wait for itself."""
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["m"]),
             helper.make_node("Add", ["a", "m"], ["y"])]
    text = both(model_of(nodes, [("x", (4, 64)), ("b", (64,)), ("w", (64, 64))], ["y"]),
                [torch.randn(4, 64), torch.randn(64), torch.randn(64, 64)])
    assert "FusedElementwise" not in text.split("# backward")[0]


def test_short_rows_stay_apart():
    """Rows of five elements would cost more calls than memory saves."""
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    text = both(model_of(nodes, [("x", (64, 5)), ("b", (5,))], ["y"]), [torch.randn(64, 5), torch.randn(5)])
    assert "FusedElementwise" not in text.split("# backward")[0]
