"""Losses whose scores exist in pieces of rows (cuda/ops/streamed_loss.c) against the same step with stored scores and
against torch in float64; for programs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import helper
from rows import NAMES, kernels, place

from onnxtrain import _C

CODES = {torch.float16: 10, torch.bfloat16: 16}
CHANCE = {torch.float16: 2**-12, torch.bfloat16: 2**-9, torch.float32: 1e-6, torch.float64: 1e-14}


def model_of(dtype: torch.dtype, tensors: Sequence[torch.Tensor], trans: int, reduction: str,
             ignored: int | None = -100) -> bytes:
    """A product of h and W, perhaps a row that is added, and the loss; 16 bits as autocast has them: the parameters are
    float32."""
    wide = "double" if dtype == torch.float64 else "float"
    names = ["h", "w", *(["b"] if len(tensors) == 4 else [])]
    shape = [", ".join(map(str, t.shape)) for t in tensors]
    given = ", ".join([f"{wide}[{shape[0]}] h", f"{wide}[{shape[1]}] w", f"int64[{shape[2]}] labels",
                       *([f"{wide}[{shape[3]}] b"] if len(tensors) == 4 else [])])
    casts = "".join(f"{n}c = Cast <to = {CODES[dtype]}> ({n}) " for n in names) if dtype in CODES else ""
    operands = ", ".join(f"{n}c" if casts else n for n in names)
    scores = "wide = Cast <to = 1> (z)" if casts else "wide = Identity(z)"
    skips = "" if ignored is None else f"ignore_index = {ignored}, "
    text = f"""<ir_version: 10, opset_import: ["" : 20]> g ({given}) => (y) {{
        {casts} z = Gemm <transB = {trans}> ({operands})  {scores}
        y = SoftmaxCrossEntropyLoss <{skips}reduction = "{reduction}"> (wide, labels) }}"""
    return onnx.parser.parse_model(text).SerializeToString()


def operands(dtype: torch.dtype, rows: int, width: int, words: int, trans: int, row: bool,
             seed: int = 0) -> list[torch.Tensor]:
    """With values that 16 bits hold."""
    rng = torch.Generator().manual_seed(seed + rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=rng)
        return (x.to(dtype) if dtype in CODES else x).to(wide)

    labels = torch.randint(0, words, (rows,), generator=rng)
    labels[-1] = words - 1
    return [draw(rows, width), draw(words, width) if trans else draw(width, words), labels,
            *([draw(words)] if row else [])]


def step(session: _C.Session, tensors: Sequence[torch.Tensor], device: str, dloss: float | torch.Tensor = 0.75,
         wants: str = "hwb") -> list[torch.Tensor]:
    """The loss, and the gradients of h, W and the row."""
    given = [t.to(place(device)) for t in tensors]
    mask = bytes(name in wants for name in "hw-b"[:len(tensors)])
    outputs, run = session.forward(given, mask)
    saved = [given[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    dy = torch.as_tensor(dloss).to(outputs[0]).expand(outputs[0].shape).contiguous()
    return [outputs[0].cpu(), *(g.cpu() for g in run.backward(saved, [dy]) if g is not None)]


def eager(tensors: Sequence[torch.Tensor], trans: int, reduction: str, dloss: float) -> list[torch.Tensor]:
    """The same by torch in float64."""
    h, w, labels, *row = tensors
    leaves = [t.double().requires_grad_() for t in (h, w, *row)]
    scores = leaves[0] @ (leaves[1].T if trans else leaves[1]) + (leaves[2] if row else 0)
    loss = F.cross_entropy(scores, labels, reduction=reduction)
    loss.backward(torch.full_like(loss, dloss))
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def both(model: bytes, device: str, level: int = 0) -> tuple[_C.Session, _C.Session]:
    """Sessions with stored scores, and with pieces: of three rows at level 0; at level 1 with a second product."""
    return _C.Session(model, 16, device, recompute=level), _C.Session(model, 16, device, recompute=level)


class Small:
    """While it lasts, programs with scores of any size are streamed; `stored`: and none while that lasts."""

    def __init__(self, stored: bool = False) -> None:
        self.stored = stored

    def __enter__(self) -> None:
        _C.disable_passes(["stream_loss"] if self.stored else [])
        _C.recompute_everywhere(not self.stored)

    def __exit__(self, *_: Any) -> None:
        _C.disable_passes([])
        _C.recompute_everywhere(False)


def errors(got: list[torch.Tensor], wants: list[torch.Tensor]) -> list[float]:
    """Relative to the entries: roots of mean squares."""
    return [((x.double() - want).norm() / want.norm().clamp(min=1e-30)).item()
            for x, want in zip(got, wants, strict=True)]


def check(dtype: torch.dtype, sizes: tuple[int, int, int], trans: int, row: bool, reduction: str,
          ignored: Sequence[int], device: str, dloss: float = 0.75) -> set[str]:
    """In both forms; no less exact than with stored scores, but for another rounding."""
    used: set[str] = set()
    tensors = operands(dtype, *sizes, trans, row)
    tensors[2][list(ignored)] = -100
    model, what = model_of(dtype, tensors, trans, reduction), (dtype, sizes, trans, row, reduction, ignored)
    wants = eager(tensors, trans, reduction, dloss)
    for level in (0, 1):
        stored, streamed = both(model, device, level)
        with Small(stored=True):
            before = step(stored, tensors, device, dloss)
        with Small():
            got = step(streamed, tensors, device, dloss)
        text = streamed.text("program")
        assert "Streamed" not in stored.text("program")
        if reduction == "none" and not level:
            assert "Streamed" not in text, text
            continue
        assert "SoftmaxCrossEntropy" not in text, text
        assert ("StreamedCrossEntropyGrad" in text) == bool(level), text
        assert [g.dtype for g in got] == [g.dtype for g in before], what
        for k, (one, other) in enumerate(zip(errors(got, wants), errors(before, wants), strict=True)):
            assert one <= 2 * other + CHANCE[dtype], (what, level, k, one, other)
        used |= kernels(streamed)
    return used


def forms(device: str) -> set[str]:
    """Whole pieces and a smaller last one, one piece alone, ignored rows, and a number of words that accesses of 16
    bytes do not fit."""
    used: set[str] = set()
    for dtype in NAMES:
        for trans, row, reduction in ((1, False, "mean"), (1, True, "sum"), (0, True, "mean"), (0, False, "none")):
            for sizes, ignored in (((7, 8, 11), (1, 6)), ((6, 16, 40), ()), ((2, 5, 9), ())):
                used |= check(dtype, sizes, trans, row, reduction, ignored, device)
    return used


def without_labels(device: str) -> set[str]:
    """No label counts: gradients of zeros, and a mean of nothing. The same with the gradients of one operand alone."""
    used: set[str] = set()
    for dtype in (torch.float32, torch.bfloat16):
        tensors = operands(dtype, 8, 8, 12, 1, True)
        some, none = tensors[2].clone(), torch.full_like(tensors[2], -100)
        for level in (0, 1):
            for reduction, wants in (("mean", "hwb"), ("sum", "w"), ("mean", "h"), ("sum", "b")):
                with Small():
                    session = _C.Session(model_of(dtype, tensors, 1, reduction), 16, device, recompute=level)
                    tensors[2] = none
                    loss, *grads = step(session, tensors, device, wants=wants)
                    assert torch.isnan(loss) if reduction == "mean" else loss == 0
                    assert len(grads) == len(wants) and not any(g.any() for g in grads)
                    tensors[2] = some
                    loss, *grads = step(session, tensors, device, wants=wants)
                    assert torch.isfinite(loss) and all(g.any() and torch.isfinite(g).all() for g in grads)
                assert "Streamed" in session.text("program")
                used |= kernels(session)
    return used


def not_finite(device: str) -> set[str]:
    """Masked words, a row of nothing else, infinity and NaN: as with stored scores."""
    used: set[str] = set()
    for dtype in (torch.float32, torch.float16):
        for level in (0, 1):
            tensors = operands(dtype, 7, 8, 12, 1, True)
            tensors[2][:] = torch.tensor([1, 2, 0, 11, 4, -100, 5])
            masked = tensors[3].clone()
            masked[6:9] = -torch.inf
            rows = {"masked": (tensors[0], masked), "nothing": (tensors[0], torch.full_like(masked, -torch.inf)),
                    "nan": (tensors[0].clone(), tensors[3]), "inf": (tensors[0].clone(), tensors[3])}
            rows["nan"][0][4, 3], rows["inf"][0][1, 0] = torch.nan, torch.inf
            stored, streamed = both(model_of(dtype, tensors, 1, "mean"), device, level)
            for name, (h, b) in rows.items():
                given = [h, tensors[1], tensors[2], b]
                with Small(stored=True):
                    before = step(stored, given, device)
                with Small():
                    got = step(streamed, given, device)
                for one, other in zip(got, before, strict=True):
                    assert torch.equal(one.isfinite(), other.isfinite()), (dtype, level, name)
                    same = torch.allclose(one, other, rtol=2e-2, atol=2e-3, equal_nan=True)
                    assert same, (dtype, level, name)
            assert "Streamed" in streamed.text("program") and "Streamed" not in stored.text("program")
            used |= kernels(streamed)
    return used


def small_gradients(device: str) -> set[str]:
    """Words that are unlikely have gradients that float16 cannot hold, of a mean over 600 rows."""
    tensors = operands(torch.float16, 600, 4, 24, 1, True)
    tensors[0] /= 4
    tensors[3][5:9] = -9
    tensors[2] = torch.where((tensors[2] > 4) & (tensors[2] < 9), 3, tensors[2])
    with Small():
        session = _C.Session(model_of(torch.float16, tensors, 1, "mean"), 16, device)
        for dloss in (1.0, 2.0**16):
            got, wants = step(session, tensors, device, dloss), eager(tensors, 1, "mean", dloss)
            for one, want in zip(got[2:], wants[2:], strict=True):
                far = ((one[5:9].double() - want[5:9]).norm() / want[5:9].norm()).item()
                assert far < 0.05, (dloss, far)
    assert "ScaleGradient" not in session.text("program") and "StreamedCrossEntropy" in session.text("program")
    return kernels(session)


def columns(device: str) -> set[str]:
    """Columns of W that are no words (align_products.c), in both forms: the gradient of theirs is 0; and a label that
    is one of them is an error, which names its place among all rows."""
    used: set[str] = set()
    for attrs, outs in (({"rows": 3}, ["y", "", "dh", "dw", "db"]), ({}, ["y"])):
        node = helper.make_node("StreamedCrossEntropy", ["h", "w", "labels", "b"], outs, "head", domain="ai.onnxtrain",
                                transB=1, classes=10, ignore_index=-100, **attrs)
        given = [helper.make_tensor_value_info(name, code, shape) for name, code, shape in
                 (("h", 1, [8, 4]), ("w", 1, [12, 4]), ("labels", 7, [8]), ("b", 1, [12]))]
        graph = helper.make_graph([node], "g", given, [onnx.ValueInfoProto(name=name) for name in outs if name])
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        session = _C.Session(model.SerializeToString(), 16, device)
        tensors = operands(torch.float32, 8, 4, 12, 1, True)
        tensors[2] %= 10
        tensors[2][2] = -100
        words = [tensors[0], tensors[1][:10], tensors[2], tensors[3][:10]]
        wants = eager(words, 1, "mean", 1.0)
        if attrs:
            got = [t.cpu() for t in session.forward([t.to(place(device)) for t in tensors], bytes(4))[0]]
        else:
            got = step(session, tensors, device, 1.0)
        assert not got[2][10:].any() and not got[3][10:].any()
        cut = [got[0], got[1], got[2][:10], got[3][:10]]
        assert max(errors(cut, wants)) < 1e-6
        used |= kernels(session)
        tensors[2][7] = 10
        try:
            for _ in range(2):  # found when the device is looked at next
                session.forward([t.to(place(device)) for t in tensors], bytes(4))
            raise AssertionError("a label out of range is no error")
        except IndexError as error:
            assert "'head': label 10 at position 7 is out of range for 10 classes" in str(error), error
    return used


def replayed(device: str) -> None:
    """Recorded and replayed phases give the bits of those that are not, wherever results lie and whatever the loss's
    gradient is."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = operands(dtype, 8, 8, 12, 1, True)
        plain, recorded = both(model_of(dtype, tensors, 1, "mean"), device)
        kept = []
        with Small():
            for k in range(12):
                tensors[0].normal_()
                tensors[2].random_(0, 12)
                _C.set_graphs(False)
                want = step(plain, tensors, device, 1.0 + k % 3)
                _C.set_graphs(True)
                got = step(recorded, tensors, device, 1.0 + k % 3)
                kept.append(got if k % 2 else [])  # so that some addresses are others
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (dtype, k)
        assert all(replays >= 3 for _, _, replays, _ in recorded.graphs()), recorded.graphs()
        assert "StreamedCrossEntropy" in recorded.text("program")


def losses(device: str) -> set[str]:
    return forms(device) | without_labels(device) | not_finite(device) | small_gradients(device) | columns(device)
