"""Heads whose scores are never stored: where the pass applies, in which form, and that nothing else changes."""


import numpy as np
import pytest
import torch
import torch.nn as nn
from onnx import helper
from workloads import GPT2

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule, _program

BATCH, LENGTH, WIDTH, WORDS = 2, 3, 4, 10


@pytest.fixture(autouse=True)
def switches_as_they_were():
    yield
    _C.disable_passes([])
    _C.recompute_everywhere(False)


def head(product="MatMul", trans=0, row=None, flat=False, reduction="mean", ignored=None, outputs=(), tied=False,
         cast=None, weights=False, sizes=(BATCH, LENGTH, WIDTH, WORDS), attrs=None, twice=False, log_prob=False):
    """(model, tensors): a product of h and W, perhaps a row, views, cross-entropy. `row`: where it is added."""
    batch, length, width, words = sizes
    rng = np.random.default_rng(1)
    w_shape = [words, width] if trans else [width, words]
    tensors = {"h": rng.normal(size=(batch * length, width) if flat else (batch, length, width)),
               "w": rng.normal(size=w_shape)}
    nodes, h = [helper.make_node("Tanh", ["h"], ["t"])], "t"  # so that what the product reads is no input of the graph
    if tied:
        tensors["tokens"] = rng.integers(0, words, (batch * length,) if flat else (batch, length))
        nodes += [helper.make_node("Gather", ["w", "tokens"], ["e"]), helper.make_node("Add", ["t", "e"], ["u"])]
        h = "u"
    ours = {"domain": "ai.onnxtrain"} if product == "FusedMatMul" else {}
    transB = {"transB": trans} if product != "MatMul" else {}
    w = "w"
    if product == "MatMul" and trans:
        nodes.append(helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]))
        w = "wt"
    operands = [h, w] + (["row"] if row == "in" else [])
    nodes.append(helper.make_node(product, operands, ["z"], **ours, **transB, **(attrs or {})))
    if row:
        tensors["row"] = rng.normal(size=words)
    scores = "z"
    if row == "add":
        nodes.append(helper.make_node("Add", ["z", "row"], ["zr"]))
        scores = "zr"
    if cast:
        nodes += [helper.make_node("Cast", [scores], ["c16"], to=cast), helper.make_node("Cast", ["c16"], ["c"], to=1)]
        scores = "c"
    nodes.append(helper.make_node("Reshape", [scores, "rows"], ["s"]))
    tensors["labels"] = rng.integers(0, words, batch * length)
    if ignored is not None:
        tensors["labels"][1:3] = ignored
    if weights:
        tensors["weights"] = rng.uniform(0.5, 1, words)
    loss = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
    nodes.append(helper.make_node("SoftmaxCrossEntropyLoss", ["s", "labels"] + (["weights"] if weights else []),
                                  ["y"] + (["logp"] if log_prob else []), **loss))
    if twice:
        nodes += [helper.make_node("SoftmaxCrossEntropyLoss", ["s", "labels"], ["y0"], reduction="sum"),
                  helper.make_node("Exp", ["y0"], ["y2"])]
    tensors = {k: torch.from_numpy(x.astype(np.float32) if x.dtype == np.float64 else x) for k, x in tensors.items()}
    inputs = [helper.make_tensor_value_info(k, 7 if k in ("labels", "tokens") else 1, list(x.shape))
              for k, x in tensors.items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info(n, 1, None) for n in ("y", *outputs)],
                              [helper.make_tensor("rows", 7, [2], [-1, words])])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(), tensors


def step(model, tensors, level, wants=("h", "w", "row")):
    """Outputs, the gradient by name, the program and its session."""
    session = _C.Session(model, recompute=level)
    given = list(tensors.values())
    outputs, run = session.forward(given, bytes(k in wants for k in tensors))
    rng = torch.Generator().manual_seed(2)
    saved = [given[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    grads = run.backward(saved, [torch.randn(y.shape, generator=rng) for y in outputs])
    return outputs, {k: g for k, g in zip(tensors, grads) if g is not None}, session.text("program"), session


def check(model, tensors, applies=True, **kwargs):
    """Both forms of the pass give what the program without it does; (text of both, session of the latter)."""
    _C.disable_passes(["stream_loss"])
    outputs, grads, text, _ = step(model, tensors, 0, **kwargs)
    assert "Streamed" not in text
    _C.disable_passes([])
    _C.recompute_everywhere(True)
    early, again = (applies if isinstance(applies, tuple) else (applies, applies))
    texts = []
    for level, wanted in ((0, early), (1, again)):
        got, got_grads, text, session = step(model, tensors, level, **kwargs)
        texts.append(text)
        assert ("ScaleGradient" in text) == (early and not level), text
        assert ("StreamedCrossEntropyGrad" in text) == (again and bool(level)), text
        assert ("SoftmaxCrossEntropy" not in text) == wanted, text
        for one, other in zip(got, outputs, strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)
        assert got_grads.keys() == grads.keys()
        for name, want in grads.items():
            assert (got_grads[name] - want).abs().max() <= 1e-6 * want.abs().max(), name
    return texts, session


FORMS = [{"product": "MatMul", "trans": 0}, {"product": "MatMul", "trans": 1}, {"product": "FusedMatMul", "trans": 1},
         {"product": "FusedMatMul", "trans": 0}, {"product": "Gemm", "trans": 1, "flat": True},
         {"product": "Gemm", "trans": 0, "flat": True}]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(map(str, f.values())))
@pytest.mark.parametrize("row", [None, "add", "in"])
def test_forms(form, row):
    if row == "in" and form["product"] == "MatMul":
        row = "add"
    apart = row == "add" and form["product"] == "Gemm"  # which fuse_gemm leaves so
    check(*head(**form, row=row, ignored=-100), applies=not apart)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [None, -1, 3])
def test_losses(reduction, ignored):
    check(*head(reduction=reduction, ignored=ignored, row="add"), applies=(reduction != "none", True))


@pytest.mark.parametrize("wants", [("h",), ("w",), ("row",), ("h", "w"), ("h", "row"), ("w", "row")], ids="-".join)
def test_what_is_frozen_has_no_gradient(wants):
    for trans in (0, 1):
        (early, again), _ = check(*head(product="FusedMatMul", trans=trans, row="in"), wants=wants)
        made = again.split(" = ai.onnxtrain.StreamedCrossEntropyGrad")[0].rpartition("\n")[2]
        assert made.count("float") == len(wants), made
        assert early.count("ScaleGradient") == len(wants)


def test_tied_weights():
    """The head's gradient of W is where the embedding's rows are added."""
    for flat in (False, True):
        texts, _ = check(*head(product="FusedMatMul", trans=1, tied=True, flat=flat), wants=("h", "w"))
        for text in texts:
            assert "GatherGrad" in text and " = Add (" not in text.split("# backward")[1], text


@pytest.mark.parametrize("how", [
    {"outputs": ("z",)}, {"outputs": ("s",)}, {"weights": True}, {"cast": 16}, {"twice": True, "outputs": ("y2",)},
    {"log_prob": True, "outputs": ("logp",)}, {"product": "FusedMatMul", "attrs": {"alpha": 0.5}},
    {"product": "Gemm", "flat": True, "row": "in", "attrs": {"beta": 0.5}}, {"product": "Gemm", "flat": True, "attrs":
                                                                              {"alpha": 2.0}},
], ids=str)
def test_what_is_left_as_it_is(how):
    model, tensors = head(**how)
    if "cast" not in how:
        check(model, tensors, applies=False)
        return
    _C.recompute_everywhere(True)
    assert "Streamed" not in step(model, tensors, 1)[2]


def test_small_scores_are_stored():
    model, tensors = head()
    assert "Streamed" not in step(model, tensors, 1)[2]
    model, tensors = head(sizes=(4, 64, 16, 4096 + 512))  # 4.5 MiB; most of the step is the head
    session = step(model, tensors, 2)[3]
    assert "StreamedCrossEntropyGrad" in session.text("program") and session.stats()["recomputed_nodes"] > 0
    _C.disable_passes(["stream_loss"])
    stored = step(model, tensors, 2)[3]
    assert "Streamed" not in stored.text("program")
    assert session.stats()["recomputed_bytes"] >= 4 * 256 * 4608
    assert session.text("program") != stored.text("program")


def test_a_product_that_is_most_of_the_step_is_not_repeated():
    """With nothing in front, the product once more would be a third of the step: forward computes the gradients."""
    model, tensors = head(sizes=(4, 64, 1024, 4608))
    text = step(model, tensors, 1)[2]
    assert "StreamedCrossEntropyGrad" not in text and "ScaleGradient" in text
    assert "Streamed" not in step(*head(sizes=(2, 64, 1024, 9000)), 1)[2]  # of too few rows for two tiles


@pytest.mark.parametrize("level", [0, 1])
def test_slab_of_a_head(level):
    model, tensors = head(product="FusedMatMul", trans=1, row="in", sizes=(8, 256, 32, 8000))  # 62 MiB of scores
    _C.disable_passes(["stream_loss"])
    stored = step(model, tensors, level)[3].stats()["slab_bytes"]
    _C.disable_passes([])
    _, _, text, session = step(model, tensors, level)
    assert "rows = " in text and "ScaleGradient" in text
    tile = (32 if level == 0 else 24) << 20
    assert session.stats()["slab_bytes"] <= stored - (62 << 20) + tile + (1 << 20)


def test_gradients_wait_for_backward_where_it_is_scaled():
    """Gradients of forward times the gradient of the loss; and a forward without backward, or two of them at a time."""
    model, tensors = head(product="FusedMatMul", trans=1, row="in", sizes=(8, 256, 32, 8000), tied=True)
    session, given = _C.Session(model), list(tensors.values())
    mask = bytes(t.is_floating_point() for t in given)
    runs = [session.forward(given, mask) for _ in range(3)]

    def backward(i, scale):
        outputs, run = runs[i]
        saved = [given[k] for k in run.saved_inputs] + [outputs[k] for k in run.saved_outputs]
        return [g for g in run.backward(saved, [torch.tensor(scale)]) if g is not None]

    one, three = backward(0, 1.0), backward(2, 3.0)
    runs[1] = None  # which never runs backward
    for a, b in zip(one, three, strict=True):
        assert torch.allclose(3 * a, b, rtol=1e-6, atol=1e-7) and a.any()
    assert [t.data_ptr() for t in one] != [t.data_ptr() for t in three]


def test_a_gradient_of_forward_is_no_part_of_the_slab():
    model, tensors = head(product="FusedMatMul", trans=1, sizes=(4, 256, 256, 8000), tied=True)  # dW: 8 MiB
    mask = bytes(t.is_floating_point() for t in tensors.values())
    plan = _C.Session(model).plan([tuple(t.shape) for t in tensors.values()], mask)
    assert [op for _, op, *_ in plan["steps"]].count("ScaleGradient") == 2
    weight = tensors["w"].numel() * 4
    assert all(size < weight for *_, size, _, _ in plan["lifetimes"])


def test_labels_out_of_range():
    model, tensors = head()
    _C.recompute_everywhere(True)
    tensors["labels"][2] = WORDS
    with pytest.raises(IndexError, match=f"label {WORDS} at position 2 of 'labels' is out of range for {WORDS} classes"):
        step(model, tensors, 1)


class Linear(nn.Module):
    """torch's own loss of a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.embedding = nn.Embedding(9000, 64)
        self.loss = None if function else nn.LinearCrossEntropyLoss(64, 9000, bias=True)
        self.weight = nn.Parameter(torch.randn(9000, 64) / 8) if function else None

    def forward(self, tokens, targets):
        h = torch.tanh(self.embedding(tokens))
        return nn.functional.linear_cross_entropy(h, self.weight, targets) if self.loss is None else self.loss(h, targets)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize("function", [True, False])
def test_linear_cross_entropy(function):
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 9000, (2, 1024))
    module = Linear(function)
    model = ORTModule(module)
    loss = model(tokens, targets)
    loss.backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    expected = module(tokens, targets)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for got, p in zip(grads, module.parameters(), strict=True):
        assert (got - p.grad).abs().max() <= 1e-5 * p.grad.abs().max()
    (program,) = [programs[-1] for _, programs in model._all_programs()]
    assert "ScaleGradient" in program.session.text("program")


class Sessions:
    """What the module's sessions are made by; the last one stands in `made`."""

    def __init__(self):
        self.made = None
        self.make = _C.Session

    def __call__(self, *args, **kwargs):
        self.made = self.make(*args, **kwargs)
        return self.made


def train(model, batch, level, monkeypatch, steps=3):
    """Losses of a few steps of gradient descent, the parameters after them, and the session."""
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", str(level))
    made = None
    if level is not None:
        sessions = Sessions()
        with monkeypatch.context() as patch:
            patch.setattr(_program._C, "Session", sessions)
            model = ORTModule(model)
            losses = [descend(model, batch) for _ in range(steps)]
        made = sessions.made
    else:
        losses = [descend(model, batch) for _ in range(steps)]
    return losses, made


def descend(model, batch):
    loss = model(*batch)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None
    return loss.item()


@pytest.mark.parametrize("tied", [True, False])
def test_small_gpt(tied, monkeypatch):
    """Loss inside the module: eager's losses, without half of the scores' 8 MiB, and at level 1 without nearly all."""
    words, results, slabs = 8000, [], []
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, words, (4, 64)), torch.randint(0, words, (4, 64))
    targets[:, -5:] = -100
    for level in (None, "stored", 0, 1):
        _C.disable_passes(["stream_loss"] if level == "stored" else [])
        torch.manual_seed(1)
        model = GPT2(words, width=32, heads=2, layers=2, positions=64)
        if not tied:
            model.head = nn.Linear(32, words)
        losses, session = train(model, (tokens, targets), 0 if level == "stored" else level, monkeypatch)
        results.append((losses, {k: p.detach() for k, p in model.named_parameters()}))
        if session is not None:
            assert ("Streamed" in session.text("program")) == (level != "stored")
            slabs.append(session.stats()["slab_bytes"])
    for losses, parameters in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-5)
        for name, want in results[0][1].items():
            assert torch.allclose(parameters[name], want, rtol=1e-4, atol=1e-6), name
    assert slabs[0] - slabs[1] > 3 << 20 and slabs[0] - slabs[2] > 5 << 20
