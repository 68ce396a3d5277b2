"""Scores' gradients in 16 bits at once, and rows of a Gather's gradient added to another gradient in place; other
readers keep
the nodes apart."""

import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from onnxtrain import _C
from test_fuse_gemm import random, step



def loss_session(dtype, reduction, ignored, shape):
    """MatMul in 16 bits, Cast to float32, cross-entropy: as autocast exports a head with its loss."""
    code = {torch.bfloat16: 16, torch.float16: 10}[dtype]
    nodes = [helper.make_node("MatMul", ["a", "w"], ["z"]), helper.make_node("Cast", ["z"], ["s"], to=1),
             helper.make_node("SoftmaxCrossEntropyLoss", ["s", "labels"], ["y"], reduction=reduction,
                              ignore_index=ignored)]
    rows, width, classes = shape
    inputs = [helper.make_tensor_value_info("a", code, [rows, width]),
              helper.make_tensor_value_info("w", code, [width, classes]),
              helper.make_tensor_value_info("labels", 7, [rows])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", 1, [])])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())


def run_loss(session, a, w, labels):
    (y,), run = session.forward([a, w, labels], b"\1\1\0")
    tensors = [a, w, labels]
    saved = [tensors[i] for i in run.saved_inputs] + [y for _ in run.saved_outputs]
    return [y, *run.backward(saved, [torch.tensor(1.5)])[:2]], session.text("program")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(7, 12, 33), (5, 8, 1024), (3, 16, 2500)], ids=str)
def test_scores(shape, reduction, dtype):
    rows, width, classes = shape
    a, w = random(rows, width, dtype=dtype, seed=1), random(width, classes, dtype=dtype, seed=2)
    labels = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(3))
    labels[0], labels[1], labels[2] = classes - 1, 0, -7
    results = []
    for off in ([], ["fuse_gradients"]):
        _C.disable_passes(off)
        try:
            results.append(run_loss(loss_session(dtype, reduction, -7, shape), a, w, labels))
        finally:
            _C.disable_passes([])
    (joined, text), (apart, text_apart) = results
    assert "to = 16" in text or "to = 10" in text or "to=16" in text or "to=10" in text, text
    assert text.count("Cast") == text_apart.count("Cast") - 1, text
    for got, want in zip(joined, apart):  # one rounding at the same place: the same bits
        assert torch.equal(got, want)
    a64, w64 = a.double().requires_grad_(), w.double().requires_grad_()
    F.cross_entropy(a64 @ w64, labels, reduction=reduction, ignore_index=-7).mul(1.5).backward()
    for got, want in zip(joined[1:], (a64.grad, w64.grad)):
        assert (got.double() - want).abs().max() <= 2e-2 * want.abs().max()


ELEM = {torch.float32: 1, torch.float64: 11, torch.bfloat16: 16, torch.float16: 10}


def parts_session(dtype, index_shape, width=6):
    """Three reads of one table, whose gradients meet in it, and one of the whole."""
    import numpy as np
    from onnx import numpy_helper

    count = int(np.prod(index_shape, dtype=int))
    constants = [numpy_helper.from_array(np.array([(3 * k + j) % 5 - (k == 1) for j in range(count)],
                                                  dtype=np.int64).reshape(index_shape), f"i{k}") for k in range(3)]
    nodes = [helper.make_node("Neg", ["x"], ["t"])]
    nodes += [helper.make_node("Gather", ["t", f"i{k}"], [f"g{k}"], axis=1) for k in range(3)]
    nodes += [helper.make_node("Mul", ["t", "c"], ["whole"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info(n, ELEM[dtype], [2, 5, width])
                                           for n in ("x", "c")],
                              [helper.make_tensor_value_info(n, ELEM[dtype], None)
                               for n in ("g0", "g1", "g2", "whole")], constants)
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString()), \
        [torch.from_numpy(np.array(numpy_helper.to_array(c))) for c in constants]


@pytest.mark.parametrize("dtype", ELEM, ids=str)
@pytest.mark.parametrize("index_shape, width", [((), 6), ((1,), 6), ((2, 4), 6), ((), 33001), ((2, 1), 9001)], ids=str)
def test_rows(index_shape, width, dtype):
    session, indices = parts_session(dtype, index_shape, width)
    x, c = random(2, 5, width, dtype=dtype, seed=4), random(2, 5, width, dtype=dtype, seed=5)
    shape = (2, *index_shape, width)
    dys = [random(*shape, dtype=dtype, seed=6 + k) for k in range(3)] + [random(2, 5, width, dtype=dtype, seed=9)]
    got, text = step(session, [x, c], dys)
    x64 = x.double().requires_grad_()
    t = -x64
    outs = [t[:, i.where(i >= 0, i + 5)] for i in indices] + [t * c.double()]
    sum((o * d.double()).sum() for o, d in zip(outs, dys)).backward()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert (got[4].double() - x64.grad).abs().max() <= tolerance * x64.grad.abs().max()
    one = index_shape in ((), (1,))
    assert ("Add" not in text) == (one or dtype.itemsize > 2), text
    _C.disable_passes(["fuse_gradients", "fuse_elementwise"])
    try:
        apart, text = step(parts_session(dtype, index_shape, width)[0], [x, c], dys)
    finally:
        _C.disable_passes([])
    assert "Add" in text
    if one:
        assert torch.equal(got[4], apart[4])


def test_absent_gradients():
    """Parts that no gradient reaches add nothing."""
    x, c = random(2, 5, 6, dtype=torch.float32, seed=4), random(2, 5, 6, dtype=torch.float32, seed=5)
    session, _ = parts_session(torch.float32, ())
    dys = [random(2, 6, dtype=torch.float32, seed=6), None, None, random(2, 5, 6, dtype=torch.float32, seed=9)]
    got, text = step(session, [x, c], dys)
    assert text.count("GatherGrad") >= 1
    want = -(dys[3] * c)
    want[:, 0] -= dys[0]
    assert (got[4] - want).abs().max() <= 1e-6 and torch.equal(got[5], -x * dys[3])


def test_leaves_the_program_as_it_was():
    """A second run of the same program has the same numbers: nothing that is read again was added to."""
    x, c = random(2, 5, 6, dtype=torch.float32, seed=4), random(2, 5, 6, dtype=torch.float32, seed=5)
    session, _ = parts_session(torch.float32, (2, 4))
    dys = [random(2, 2, 4, 6, dtype=torch.float32, seed=6 + k)
           for k in range(3)] + [random(2, 5, 6, dtype=torch.float32, seed=9)]
    kept = [d.clone() for d in dys]
    first, _ = step(session, [x, c], dys)
    second, _ = step(session, [x, c], dys)
    assert all(torch.equal(a, b) for a, b in zip(first, second)) and all(torch.equal(a, b) for a, b in zip(dys, kept))
