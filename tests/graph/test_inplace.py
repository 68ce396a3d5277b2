"""Results that take an operand's place in memory: only one of the same size, element by element; and gradients that
take an input's, which the caller says is read by nobody else."""

import random

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from seeds import drawn_seed
from test_fuse_elementwise import random_model

import onnxtrain.backend
from onnxtrain import _C

SEED = drawn_seed()

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("small, large", [((4,), (4, 4)), ((2, 1), (2, 4)), ((1,), (2, 2)), ((4, 1), (4, 4))])
def test_comparison_has_the_bytes_of_a_broadcast_operand(small, large):
    """(4,) float32 and (4, 4) bool are 16 bytes both: a result written over the operand would be read back as a
    number.
    """
    nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("Greater", ["n", "y"], ["g"]),
             helper.make_node("Not", ["g"], ["z"])]
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in (("x", small), ("y", large))]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("z", onnx.TensorProto.BOOL, large)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    prepared = onnxtrain.backend.prepare(model)
    for _ in range(8):
        x, y = (RNG.standard_normal(s).astype(np.float32) for s in (small, large))
        np.testing.assert_array_equal(prepared.run([x, y])[0], ~(-x > y))


PERM = RNG.permutation(9)
SCATTERS = {
    "add to rows": (helper.make_node("ScatterND", ["n", "i", "n"], ["y"], reduction="add"), PERM[:, None],
                    lambda n, y: y.__setitem__(PERM, y[PERM] + n)),
    "replace rows": (helper.make_node("ScatterND", ["n", "i", "n"], ["y"]), PERM[:, None],
                     lambda n, y: y.__setitem__(PERM, n)),
    "add to elements": (helper.make_node("ScatterElements", ["n", "i", "n"], ["y"], axis=0, reduction="add"),
                        np.repeat(PERM[:, None], 300, 1), lambda n, y: y.__setitem__(PERM, y[PERM] + n)),
    "replace elements": (helper.make_node("ScatterElements", ["n", "i", "n"], ["y"], axis=0),
                         np.repeat(PERM[:, None], 300, 1), lambda n, y: y.__setitem__(PERM, n)),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_a_scatter_of_what_it_scatters_into(name):
    """A value that is the data and the updates of one node is read at other rows than those written."""
    node, index, change = SCATTERS[name]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [9, 300]),
              helper.make_tensor_value_info("i", onnx.TensorProto.INT64, index.shape)]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["n"]), node], "g", inputs, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = RNG.standard_normal((9, 300)).astype(np.float32)
    want = -x
    change(-x, want)
    np.testing.assert_allclose(onnxtrain.backend.prepare(model).run([x, index])[0], want)


def step(session, tensors, grads, donated=()):
    """(saved inputs, as they are behind it; gradients; how many of them lie in their inputs) of one step."""
    tensors = [t.clone() for t in tensors]
    outputs, run = session.forward(tensors, b"\1" * len(tensors), 7)
    saved = [tensors[i] for i in run.saved_inputs]
    found = run.backward(saved + [outputs[i] for i in run.saved_outputs], grads, donated)
    return tensors, found, [i for i, g in enumerate(found) if g is tensors[i]]


@pytest.mark.parametrize("index", range(60))
def test_gradients_over_spent_inputs(index):
    """Of random graphs: the same bits, and nothing but what was donated is written over."""
    rng = random.Random(SEED + index)
    model, names = random_model(rng)
    generator = torch.Generator().manual_seed(SEED + index)
    tensors = [torch.randn(shape, generator=generator) * (0.1 if name == "w" else 1) for name, shape in names]
    session = _C.Session(model)
    grads = [torch.randn(y.shape, generator=generator) for y in session.forward(tensors, b"\0" * len(tensors), 7)[0]]
    _, expected, over = step(session, tensors, grads)
    assert not over
    donated = [i for i in range(len(tensors)) if rng.random() < 0.7]
    left, found, over = step(session, tensors, grads, donated)
    assert set(over) <= set(donated)
    for i, (got, want) in enumerate(zip(found, expected)):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got.view(torch.int32), want.view(torch.int32))
        assert i in over or torch.equal(left[i], tensors[i])


def head(nodes, n_inputs=1, rows=8):
    """A session of nodes over (rows, 64) inputs x0, x1, .. and labels t, to an output y."""
    inputs = [helper.make_tensor_value_info(f"x{i}", onnx.TensorProto.FLOAT, [rows, 64]) for i in range(n_inputs)]
    inputs.append(helper.make_tensor_value_info("t", onnx.TensorProto.INT64, [rows]))
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
                      .SerializeToString())


def losses(rows=8):
    return head([helper.make_node("SoftmaxCrossEntropyLoss", ["x0", "t"], ["y"])], rows=rows)


def test_the_gradient_of_scores_lies_over_them():
    session = losses()
    x, t = torch.randn(8, 64), torch.arange(8)
    for donated, expected in (((), []), ((0,), [0]), ([0, 0], [0]), ((1,), [])):
        got, found, over = step(session, [x, t], [torch.tensor(1.0)], donated)
        assert over == expected
        leaf = x.clone().requires_grad_()
        torch.nn.functional.cross_entropy(leaf, t).backward()
        torch.testing.assert_close(found[0], leaf.grad)
        assert torch.equal(got[1], t)


def test_an_input_that_is_read_later_stays_as_it_is():
    """x0 is read by the gradient of its square after it, or in another order; either way it is not lost too early."""
    session = head([helper.make_node("Mul", ["x0", "x0"], ["square"]), helper.make_node("Exp", ["x1"], ["e"]),
                    helper.make_node("Mul", ["square", "e"], ["product"]),
                    helper.make_node("SoftmaxCrossEntropyLoss", ["product", "t"], ["y"])], n_inputs=2)
    tensors = [torch.randn(8, 64), torch.randn(8, 64), torch.arange(8)]
    _, expected, _ = step(session, tensors, [torch.tensor(1.0)])
    for donated in ((0,), (1,), (0, 1)):
        left, found, over = step(session, tensors, [torch.tensor(1.0)], donated)
        for i in range(2):
            assert torch.equal(found[i], expected[i])
            assert i in over or torch.equal(left[i], tensors[i])


@pytest.mark.parametrize("strided", [lambda x: x.t().contiguous().t(), lambda x: torch.cat([x, x], 1)[:, :64]],
                         ids=["transposed", "rows apart"])
def test_strided_inputs_are_not_written_over(strided):
    session = losses()
    x, t = strided(torch.randn(8, 64)), torch.arange(8)
    before = x.clone()
    (y,), run = session.forward((x, t), b"\1\0", 0)
    found = run.backward((x, t), (torch.ones_like(y),), (0,))[0]
    assert found is not x and torch.equal(x, before)


def test_spent_names_inputs():
    session = losses()
    x, t = torch.randn(8, 64), torch.arange(8)
    (y,), run = session.forward((x, t), b"\1\0", 0)
    for donated, error in (((2,), IndexError), ((-1,), IndexError), (("x",), TypeError), (3, TypeError)):
        with pytest.raises(error):
            run.backward((x, t), (torch.ones_like(y),), donated)
    assert run.backward((x, t), (torch.ones_like(y),), donated=(0,))[0] is x  # none of these has ended it


def test_empty_scores():
    session = losses(rows=0)
    x, t = torch.randn(0, 64), torch.zeros(0, dtype=torch.int64)
    found = step(session, [x, t], [torch.tensor(1.0)], (0,))[1]
    assert found[0].shape == (0, 64)
