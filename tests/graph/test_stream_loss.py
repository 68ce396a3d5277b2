"""Heads whose scores are never stored: where the pass applies, in which form, and that nothing else changes."""


import numpy as np
import pytest
import torch
import torch.nn as nn
from harness import HALF_KERNELS
from onnx import helper
from workloads import GPT2, Bert

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule, _program

BATCH, LENGTH, WIDTH, WORDS = 2, 3, 4, 10


@pytest.fixture(autouse=True)
def switches_as_they_were():
    yield
    _C.disable_passes([])
    _C.disable_kernels([])
    _C.recompute_everywhere(False)


def head(product="MatMul", trans=0, row=None, flat=False, reduction="mean", ignored=None, outputs=(), tied=False,
         cast=None, weights=False, sizes=(BATCH, LENGTH, WIDTH, WORDS), attrs=None, twice=False, log_prob=False,
         half=None, double=False):
    """(model, tensors): a product of h and W, perhaps a row, views, cross-entropy. `row`: where it is added. `half`: the
    dtype of the product where that is of 16 bits, as under autocast. `double`: everything in float64, but for rounded
    operands of such a product."""
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
    if half:
        nodes += [helper.make_node("Cast", [x], [f"{x}_half"], to=half) for x in operands]
        operands = [f"{x}_half" for x in operands]
        if double:
            nodes += [helper.make_node("Cast", [x], [f"{x}_wide"], to=11) for x in operands]
            operands = [f"{x}_wide" for x in operands]
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
    if half and not double:
        nodes.append(helper.make_node("Cast", [scores], ["wide"], to=1))
        scores = "wide"
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
    if double:
        tensors = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    dtype = 11 if double else 1
    inputs = [helper.make_tensor_value_info(k, 7 if k in ("labels", "tokens") else dtype, list(x.shape))
              for k, x in tensors.items()]
    results = [helper.make_tensor_value_info(n, dtype, None) for n in ("y", *outputs)]
    graph = helper.make_graph(nodes, "g", inputs, results,
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
    grads = run.backward(saved, [torch.randn(y.shape, generator=rng).to(y.dtype) for y in outputs])
    return outputs, {k: g for k, g in zip(tensors, grads) if g is not None}, session.text("program"), session


def check(model, tensors, applies=True, tolerance=1e-6, **kwargs):
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
            assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)
        assert got_grads.keys() == grads.keys()
        for name, want in grads.items():
            assert (got_grads[name] - want).abs().max() <= tolerance * want.abs().max(), name
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


@pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(map(str, f.values())))
def test_float64(form):
    row = None if form["product"] == "MatMul" else "in"
    for sizes in (2, 3, 4, 10), (1, 1, 4, 10), (4, 64, 16, 203):
        texts, _ = check(*head(**form, row=row, ignored=-100 if sizes[0] > 1 else None, double=True, sizes=sizes),
                         tolerance=1e-13)
        assert all("double" in text and "float" not in text.split("{")[1] for text in texts)


def errors(got, wants):
    """The error of each tensor, relative to its entries: roots of mean squares."""
    return [((x.double() - want).norm() / want.norm()).item() for x, want in zip(got, wants, strict=True)]


@pytest.mark.parametrize("half, widened", [(10, True), (16, True), (16, False)], ids=["float16", "bfloat16", "own"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(map(str, f.values())))
def test_a_product_of_16_bits(form, half, widened):
    """Widened, as where the processor has no such product, or its own: no less exact than with stored scores, which may
    be rounded, as are their gradients."""
    if widened:
        _C.disable_kernels(HALF_KERNELS)
    large = 4, 64, 16, 203
    for sizes, ignored, reduction, tied in (((2, 3, 4, 10), -100, "mean", True), ((1, 1, 4, 10), None, "sum", False),
                                            (large, 7, "mean", True), (large, 7, "none", False)):
        how = form | {"row": None if form["product"] == "MatMul" else "in", "ignored": ignored, "sizes": sizes,
                      "reduction": reduction, "tied": tied and form["trans"] == 1, "half": half}
        model, tensors = head(**how)
        names = [k for k, x in tensors.items() if x.is_floating_point()]
        _C.disable_passes(["stream_loss"])
        exact = step(*head(**how, double=True), 0, names)
        stored = step(model, tensors, 0, names)
        assert "Streamed" not in stored[2]
        stored_errors = errors([stored[0][0], *stored[1].values()], [exact[0][0], *exact[1].values()])
        _C.disable_passes([])
        _C.recompute_everywhere(True)
        chance = 1e-6 if sizes == large else 2.0**-7 if half == 16 else 2.0**-10  # of a few entries
        for level in 0, 1:
            got = step(model, tensors, level, names)
            assert ("Streamed" in got[2]) == (reduction != "none" or level == 1), got[2]
            assert [g.dtype for g in got[1].values()] == [torch.float32] * len(names)
            assert not widened or "to = " not in got[2].split("StreamedCrossEntropy")[-1].split(">")[0]
            for one, other in zip(errors([got[0][0], *got[1].values()], [exact[0][0], *exact[1].values()]),
                                  stored_errors, strict=True):
                # Own gradients of scores are rounded before they are multiplied by that of the loss: another mantissa.
                factor = 1.05 if widened or level else 2
                assert one <= factor * other + chance, (level, how, one, other)
        _C.recompute_everywhere(False)


class Head(nn.Module):
    """A head of GPT-2's vocabulary and its loss; `layout`: how the weight is stored, or "tied"."""

    def __init__(self, layout, bias, reduction, words=50257, width=24):
        super().__init__()
        self.words, self.layout, self.reduction = nn.Embedding(words, width), layout, reduction
        shape = (width, words) if layout == "kn" else (words, width)
        self.weight = self.words.weight if layout == "tied" else nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(words)) if bias else None

    def forward(self, tokens, targets):
        h = torch.tanh(self.words(tokens))
        if self.layout == "kn":
            scores = torch.matmul(h, self.weight)
            scores = scores if self.bias is None else scores + self.bias
        else:
            scores = nn.functional.linear(h, self.weight, self.bias)
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction=self.reduction)


def own_products(session):
    """Whether the program multiplies bfloat16 as it is, which is up to the processor."""
    return any(kernel in (*HALF_KERNELS, "streamed_cross_entropy_half") for _, kernel, _ in session.kernels())


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
@pytest.mark.parametrize("layout, bias, reduction", [("nk", True, "mean"), ("kn", False, "sum"), ("tied", False, "mean"),
                                                     ("nk", True, "none")])
def test_a_vocabulary_of_odd_size(layout, bias, reduction, kind, level, monkeypatch):
    """The loss of stored scores, and gradients that differ from eager's by no more than those of stored ones; 703 rows,
    which no tile divides."""
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", str(level))
    torch.manual_seed(0)
    module = Head(layout, bias, reduction).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    tokens, targets = torch.randint(0, 50257, (2, 19, 37))
    targets[3:5, 1:7], targets[0, 0] = -100, 50256
    model, exact = ORTModule(module), Head(layout, bias, reduction).double()
    exact.load_state_dict(module.state_dict())
    if layout == "tied":
        exact.weight = exact.words.weight

    def run(which, autocast):
        which.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = which(tokens, targets)
        loss.backward(torch.ones_like(loss))
        return [loss.detach(), *(p.grad.clone() for p in which.parameters())]

    wants, eager = run(exact, False), run(module, kind == "autocast")
    _C.disable_passes(["stream_loss"])
    stored = run(model, kind == "autocast")
    (session,) = (programs[-1].session for _, programs in model._all_programs())
    stored_bytes, own = session.stats()["slab_bytes"], own_products(session)
    assert "Streamed" not in session.text("program")
    _C.disable_passes([])
    torch.set_num_threads(torch.get_num_threads() + 1)  # another program
    try:
        got = run(model, kind == "autocast")
    finally:
        torch.set_num_threads(torch.get_num_threads() - 1)
    (session,) = (programs[-1].session for _, programs in model._all_programs())
    assert own_products(session) == own
    assert ("Streamed" in session.text("program")) == (reduction != "none" or level == 1)
    assert ("streamed_cross_entropy_half" in str(session.kernels())) == (own and "Streamed" in session.text("program"))
    if own and kind == "autocast":  # scores are rounded at the same place
        assert torch.allclose(got[0], stored[0], rtol=1e-6, atol=0)
    for one, other, third, want in zip(got, stored, eager, wants, strict=True):
        assert one.dtype == third.dtype
        error, before, eagers = ((x.double() - want).norm() / want.norm() for x in (one, other, third))
        assert error <= 1.05 * before + 1e-5
        assert error <= 1.05 * eagers + 1e-5 or "Streamed" not in session.text("program")
    if "Streamed" in session.text("program"):
        assert session.stats()["slab_bytes"] < stored_bytes - (16 << 20)


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

    def __init__(self, function, reduction):
        super().__init__()
        self.embedding = nn.Embedding(9000, 64)
        self.kwargs = {"reduction": reduction, "ignore_index": 7}
        self.loss = None if function else nn.LinearCrossEntropyLoss(64, 9000, bias=True, **self.kwargs)
        self.weight = nn.Parameter(torch.randn(9000, 64) / 8) if function else None

    def forward(self, tokens, targets):
        h = torch.tanh(self.embedding(tokens))
        if self.loss is not None:
            return self.loss(h, targets)
        return nn.functional.linear_cross_entropy(h, self.weight, targets, **self.kwargs)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize("function, reduction", [(True, "mean"), (False, "sum")])
def test_linear_cross_entropy(function, reduction):
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 9000, (2, 1024))
    targets[10:40] = 7
    module = Linear(function, reduction)
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


@pytest.fixture
def threads_as_they_were():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind, widened", [("autocast", True), ("autocast", False), ("bfloat16", True),
                                           ("bfloat16", False), ("float64", True)])
def test_bert(kind, widened, dropout, threads_as_they_were, monkeypatch):
    """With dropout, what the same step with stored scores gives; without, eager's; by any number of threads."""
    if widened:
        _C.disable_kernels(HALF_KERNELS)
    torch.manual_seed(0)
    dtype = {"autocast": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[kind]
    module = Bert(8000, width=32, layers=1, heads=2, positions=64).to(dtype)
    module.head.weight = module.words.weight
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = dropout
    tokens, targets = torch.randint(0, 8000, (16, 64)), torch.randint(0, 8000, (16, 64))
    targets[:, 1:7] = -100
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    model = ORTModule(module)

    def run(which, threads=2):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = which(tokens, targets)
        (3 * loss).backward()
        return [loss.detach(), *(p.grad.clone() for p in module.parameters())]

    _C.disable_passes(["stream_loss"])
    stored = run(model)  # the program of two threads
    expected = stored if dropout else run(module)
    (session,) = (programs[-1].session for _, programs in model._all_programs())
    stored_bytes = session.stats()["slab_bytes"]
    assert "Streamed" not in session.text("program")
    _C.disable_passes([])
    for threads in 1, 3, 7:
        for got, want in zip(run(model, threads), expected, strict=True):
            assert got.dtype == want.dtype
            limit = {"float64": 1e-10, "autocast": 0.02, "bfloat16": 0.05}[kind]  # eager rounds more often
            assert (got - want).norm() <= limit * want.norm()
        assert "ScaleGradient" in session.text("program")
        assert session.stats()["slab_bytes"] < stored_bytes - (8 << 20)  # of 16 MiB or more of scores


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
