"""Cross-entropy that reads 16-bit scores and writes its gradient in 16 bits; other readers keep the float32 copy."""

import pytest
import torch
import torch.nn.functional as F
from harness import HALF_KERNELS
from onnx import helper
from test_fuse_gemm import random

from onnxtrain import _C

CODE = {torch.bfloat16: 16, torch.float16: 10}


def loss_session(dtype, reduction, ignored, shape, order="cast", outputs=(), weights=False, bias=False):
    """MatMul in 16 bits, Cast to float32, cross-entropy: as autocast exports a head with its loss. `order`:
    where a Reshape is.
    """
    rows, width, classes = shape
    nodes = [helper.make_node("MatMul", ["a", "w"], ["p" if bias else "z"])]
    if bias:
        nodes.append(helper.make_node("Add", ["p", "b"], ["z"]))
    to_rows, shape_of_rows = "z", helper.make_tensor("shape", 7, [2], [-1, classes])
    if order == "view, cast":
        nodes.append(helper.make_node("Reshape", ["z", "shape"], ["v"]))
        to_rows = "v"
    nodes.append(helper.make_node("Cast", [to_rows], ["c"], to=1))
    if order == "cast, view":
        nodes.append(helper.make_node("Reshape", ["c", "shape"], ["s"]))
    else:
        nodes.append(helper.make_node("Identity", ["c"], ["s"]))
    nodes.append(helper.make_node("SoftmaxCrossEntropyLoss", ["s", "labels", *(["weights"] if weights else [])], ["y"],
                                  reduction=reduction, ignore_index=ignored))
    inputs = [helper.make_tensor_value_info("a", CODE[dtype], [1, rows, width] if order != "cast" else [rows, width]),
              helper.make_tensor_value_info("w", CODE[dtype], [width, classes]),
              helper.make_tensor_value_info("labels", 7, [rows])]
    if weights:
        inputs.append(helper.make_tensor_value_info("weights", 1, [classes]))
    if bias:
        inputs.append(helper.make_tensor_value_info("b", CODE[dtype], [classes]))
    y = helper.make_tensor_value_info("y", 1, [rows] if reduction == "none" else [])
    graph = helper.make_graph(nodes, "g", inputs, [y, *[helper.make_tensor_value_info(n, 1, None) for n in outputs]],
                              [shape_of_rows] if order != "cast" else [])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())


def run_loss(session, tensors, dy, off=()):
    """Loss and gradients of a and w, and the program's text; `off`: passes to leave out."""
    _C.disable_passes(list(off))
    try:
        outputs, run = session.forward(tensors, bytes([1, 1, *[0] * (len(tensors) - 2)]))
    finally:
        _C.disable_passes([])
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    return [outputs[0], *run.backward(saved, [dy, *[None] * (len(outputs) - 1)])[:2]], session.text("program")


def batch(shape, dtype, ignored=-7):
    rows, width, classes = shape
    labels = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(3))
    labels[0], labels[1], labels[2] = classes - 1, 0, ignored
    return random(rows, width, dtype=dtype, seed=1), random(width, classes, dtype=dtype, seed=2), labels


@pytest.mark.parametrize("dtype", CODE, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("order", ["cast", "view, cast", "cast, view"])
@pytest.mark.parametrize("shape", [(7, 12, 33), (5, 8, 1024), (3, 16, 2500)], ids=str)
def test_scores(shape, order, reduction, dtype):
    a, w, labels = batch(shape, dtype)
    tensors = [a if order == "cast" else a[None], w, labels]
    dy = torch.tensor(1.5) if reduction != "none" else random(shape[0], dtype=torch.float32, seed=5)
    session = loss_session(dtype, reduction, -7, shape, order)
    got, text = run_loss(session, tensors, dy)
    narrow = any(kernel in HALF_KERNELS for _, kernel, _ in session.kernels())
    apart, text_apart = run_loss(loss_session(dtype, reduction, -7, shape, order), tensors, dy,
                                 ["fuse_loss", "fuse_gemm"])
    assert "stash_type" not in text_apart
    assert ("stash_type" in text) == narrow, text  # where the product in front of it writes 16 bits itself
    assert not narrow or ("Cast" not in text and text_apart.count("Cast") == 2), text
    ulp = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert torch.allclose(got[0], apart[0], rtol=1e-6 if narrow else ulp, atol=1e-6)
    for one, other in zip(got[1:], apart[1:]):  # rounded at the same place, of sums in another order
        assert (one.double() - other.double()).abs().max() <= 2 * ulp * other.double().abs().max()
    a64, w64 = a.double().requires_grad_(), w.double().requires_grad_()
    loss = F.cross_entropy(a64 @ w64, labels, reduction=reduction, ignore_index=-7)
    loss.backward(dy.double())
    for one, want in zip(got[1:], (a64.grad, w64.grad)):
        assert (one.reshape(want.shape).double() - want).abs().max() <= 2e-2 * want.abs().max()


@pytest.mark.parametrize("order", ["cast", "view, cast"])
def test_scores_with_a_bias(order):
    """The row is part of the product, which still writes 16 bits."""
    shape = (7, 12, 2500)
    a, w, labels = batch(shape, torch.bfloat16)
    bias = random(2500, dtype=torch.bfloat16, seed=8)
    session = loss_session(torch.bfloat16, "mean", -7, shape, order, bias=True)
    got, text = run_loss(session, [a if order == "cast" else a[None], w, labels, bias], torch.tensor(1.0))
    narrow = any(kernel in HALF_KERNELS for _, kernel, _ in session.kernels())
    assert ("stash_type" in text) == narrow and (not narrow or "Add" not in text and "Cast" not in text), text
    a64, w64 = a.double().requires_grad_(), w.double().requires_grad_()
    loss = F.cross_entropy(a64 @ w64 + bias.double(), labels, ignore_index=-7)
    loss.backward()
    assert torch.allclose(got[0].double(), loss, rtol=1e-2)
    for one, want in zip(got[1:], (a64.grad, w64.grad)):
        assert (one.reshape(want.shape).double() - want).abs().max() <= 2e-2 * want.abs().max()


@pytest.mark.parametrize("dtype", CODE, ids=str)
def test_masked_columns_and_rows_of_no_weight(dtype):
    """Whole pieces of minus infinity, and nothing but ignored labels: as torch has it, not a number."""
    rows, classes = 4, 3000
    scores = random(rows, classes, dtype=dtype, seed=1)
    scores[1, :2048], scores[2, 1024:] = -torch.inf, -torch.inf
    labels = torch.tensor([5, 2500, 17, 2999])
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["s"], to=1),
         helper.make_node("SoftmaxCrossEntropyLoss", ["s", "labels"], ["y"], ignore_index=-100)], "g",
        [helper.make_tensor_value_info("x", CODE[dtype], [rows, classes]),
         helper.make_tensor_value_info("labels", 7, [rows])],
        [helper.make_tensor_value_info("y", 1, [])])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                           ir_version=10).SerializeToString())
    for target in (labels, torch.full_like(labels, -100)):
        (y,), run = session.forward([scores, target], b"\1\0")
        saved = [(scores, target)[i] for i in run.saved_inputs] + [y for _ in run.saved_outputs]
        dx = run.backward(saved, [torch.tensor(1.0)])[0]
        wide = scores.float().requires_grad_()
        loss = F.cross_entropy(wide, target)
        loss.backward()
        assert torch.allclose(y, loss, equal_nan=True, rtol=1e-6)
        assert torch.allclose(dx.float(), wide.grad, rtol=2**-7, atol=1e-7, equal_nan=True)
    assert "stash_type" in session.text("program")


@pytest.mark.parametrize("what", ["output", "weights"])
def test_what_others_read_stays(what):
    shape = (7, 12, 33)
    a, w, labels = batch(shape, torch.bfloat16)
    weights = [random(33, dtype=torch.float32, seed=7).abs()] if what == "weights" else []
    session = loss_session(torch.bfloat16, "mean", -7, shape, outputs=("c",) if what == "output" else (),
                           weights=bool(weights))
    got, text = run_loss(session, [a, w, labels, *weights], torch.tensor(1.0))
    assert "stash_type" not in text
    a64, w64 = a.double().requires_grad_(), w.double().requires_grad_()
    F.cross_entropy(a64 @ w64, labels, ignore_index=-7, weight=weights[0].double() if weights else None).backward()
    for one, want in zip(got[1:], (a64.grad, w64.grad)):
        assert (one.double() - want).abs().max() <= 2e-2 * want.abs().max()


def test_labels_out_of_range():
    a, w, labels = batch((7, 12, 33), torch.bfloat16)
    labels[4] = 33
    with pytest.raises(IndexError, match="label 33 at position 4"):
        run_loss(loss_session(torch.bfloat16, "mean", -7, (7, 12, 33)), [a, w, labels], torch.tensor(1.0))
