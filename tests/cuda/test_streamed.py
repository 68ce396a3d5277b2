"""The loss in pieces of rows on the emulated device: when the pass makes it, GPT-2 with it, and planted faults."""

from __future__ import annotations

import copy
from unittest import mock

import costs
import pytest
import streamed
import torch
from planned import Node, Value
from planted import Fault
from torch import nn
from workloads import GPT2

from onnxtrain import _C, _report
from onnxtrain.ortmodule import ORTModule, _runner

FILE = "ops/streamed_loss.c"
FAULTS = {
    "the last rows left out": Fault(
        FILE, "first < s->loss.rows; first += s->piece", "first + s->piece <= s->loss.rows; first += s->piece",
        "streamed_losses", "AssertionError"),
    "gradients of W that are not added": Fault(
        FILE, "g.beta = product == ADD_TO_W;", "g.beta = 0;", "streamed_losses", "AssertionError"),
    "gradients of h in the place of the first piece": Fault(
        FILE, "j->dh + first * s->width * wide", "j->dh", "streamed_losses", "AssertionError"),
    "partial sums over those of the piece before": Fault(
        FILE, "j->work + s->sums + j->parts * columns * wide", "j->work + s->sums", "streamed_losses",
        "AssertionError"),
    "gradients that float16 does not hold": Fault(
        FILE, "return (double)scale;", "return 1;", "streamed_losses", "AssertionError"),
    "labels of the first piece": Fault(
        "kernels/loss.cu", "(const char *)p->labels + p->first *", "(const char *)p->labels + 0 *", "streamed_losses",
        "AssertionError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(planted_faults, name):
    planted_faults.assert_found(name)


@pytest.fixture
def device(emulated):
    _C.open_plugin(str(emulated))
    yield "emulated"
    _C.disable_passes([])
    _C.disable_kernels([])
    _C.recompute_everywhere(False)


def planned(device: str, dtype: torch.dtype, rows: int, width: int, words: int, level: int = 0,
            reduction: str = "mean") -> tuple[str, int]:
    """The program of such a head, which is not run, and the bytes of its slab."""
    shapes = [(rows, width), (words, width), (rows,)]
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    session = _C.Session(streamed.model_of(dtype, tensors, 1, reduction), 16, device, recompute=level)
    plan = session.plan(shapes, b"\1\1\0")
    return session.text("program"), plan["slab_bytes"]


@pytest.mark.parametrize("dtype, rows, width, words, pieces", [
    (torch.bfloat16, 16384, 128, 50257, (8192, 2048)),  # of two pieces at level 0, and of eight above
    (torch.float16, 8192, 256, 50000, (4096, 2048)),
    (torch.float32, 8192, 64, 40000, (4096, 2048)),
    (torch.bfloat16, 8191, 128, 50257, (0, 2816)),      # too few rows for two pieces at level 0
    (torch.bfloat16, 8192, 128, 20000, (0, 2048)),      # too few bytes
    (torch.bfloat16, 4095, 128, 50257, (0, 0)),
    (torch.bfloat16, 8192, 4096, 32000, (0, 0)),        # the gradient of W waits in float32, and is as large
])
def test_scores_are_in_pieces_where_that_saves_memory(device, dtype, rows, width, words, pieces):
    for level, piece in enumerate(pieces):
        _C.disable_passes(["stream_loss"])
        before, bytes_before = planned(device, dtype, rows, width, words, level)
        _C.disable_passes([])
        text, nbytes = planned(device, dtype, rows, width, words, level)
        assert "SoftmaxCrossEntropyGrad" in before and "Streamed" not in before
        if not piece:
            assert text == before
            continue
        assert f"rows = {piece}," in text and "SoftmaxCrossEntropy" not in text, text
        assert (f"classes = {words}," in text) == (words % 8 != 0), text  # align_products has added columns
        scores = rows * (words + -words % 8) * (4 if dtype == torch.float32 else 2)
        kept = 4 * width * (rows + words + 8)  # gradients of h and W
        assert bytes_before - nbytes >= scores - scores * piece // rows - kept - (1 << 20)
        assert level or bytes_before - nbytes >= 256 << 20


def test_a_node_that_the_device_declines_is_not_made(device):
    sizes = torch.bfloat16, 16384, 128, 50257
    _C.disable_passes(["stream_loss"])
    before = planned(device, *sizes)
    _C.disable_passes([])
    for name in ("cuda_streamed_cross_entropy", "cuda_streamed_cross_entropy_grad"):
        _C.disable_kernels([name])
        _C.recompute_everywhere(name.endswith("_grad"))  # with a second product
        level = int(name.endswith("_grad"))
        text, _ = planned(device, torch.bfloat16, 64, 16, 64, level) if level else planned(device, *sizes)
        assert "Streamed" not in text and "SoftmaxCrossEntropyGrad" in text, text
        assert level or text == before[0]


def test_a_loss_of_each_row_is_stored_at_level_0(device):
    text, _ = planned(device, torch.bfloat16, 16384, 128, 50257, reduction="none")
    assert "Streamed" not in text


def train(module: nn.Module, batch: tuple[torch.Tensor, ...], half: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps, and the parameters after them."""
    losses, optimizer = [], torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = module(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gpt2(device, tied, half):
    """As in eager, with pieces of three of its 36 rows."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 90, (3, 12)), torch.randint(0, 90, (3, 12))
    targets[:, -2:] = -100
    module = GPT2(90, width=32, heads=2, layers=2, positions=12)
    if not tied:
        module.head = nn.Linear(32, 90)
    eager = copy.deepcopy(module)
    if tied:
        eager.head.weight = eager.words.weight
    _C.recompute_everywhere(True)
    with mock.patch.object(_runner, "device_of", lambda tensors: device):
        model = ORTModule(module)
        losses, parameters = train(model, (tokens, targets), half)
        (program,) = [programs[-1] for _, programs in model._all_programs()]
        assert not _report.stats(model)["fallback_steps"], _report.stats(model)["reasons"]
    text = program.session.text("program")
    assert "StreamedCrossEntropy <rows = 3," in text and "SoftmaxCrossEntropy" not in text
    wants, others = train(eager, (tokens, targets), half)
    assert losses == pytest.approx(wants, rel=1e-2 if half else 1e-5)
    for p, want in zip(parameters, others, strict=True):
        assert (p - want).norm() <= (0.02 if half else 1e-5) * want.norm()


def test_the_model_of_times_counts_pieces():
    """All launches, and a second pass over the gradient of W for each piece but the first."""
    h, w, labels = Value("h", "bfloat16", (2, 50, 64)), Value("w", "bfloat16", (96, 64)), Value("l", "int64", (100,))
    outs = (Value("y", "float", ()), None, Value("dh", "float", h.shape), Value("dw", "float", w.shape),
            Value("db", "float", (96,)))
    row = Value("b", "bfloat16", (96,))

    def cost(rows: int, n: int) -> costs.Cost:
        return costs.streamed(Node("n", "StreamedCrossEntropy", "", False, (h, w, labels, row), outs[:n],
                                   {"rows": rows} if rows else {}, {}))

    assert [cost(40, n).launches for n in (5, 4, 3)] == [19, 14, 11]
    assert cost(0, 2).launches == 4 and cost(0, 2).flops == 2 * 100 * 96 * 64
    one, three = cost(100, 4), cost(40, 4)
    assert three.nbytes - one.nbytes == 2 * 2 * outs[3].nbytes and three.flops == one.flops
    assert three.seconds > one.seconds
