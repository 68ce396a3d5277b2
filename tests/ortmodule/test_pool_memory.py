"""Memory of outputs and gradients is used again, step after step, whatever shapes went before and whatever is held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

SMAPS = Path("/proc/self/smaps")
WARM, STEPS, INPUTS = 30, 10, 96


class WithLoss(nn.Module):
    """Gradients are all that is large, and live at the same time: x's, of some size, beside the weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, 70)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x), t)


def made_anew(model: ORTModule) -> int:
    """Blocks that were not had from the pool."""
    sessions = [program.session.stats() for _, known in model._all_programs() for program in known]
    return sum(s["blocks_taken"] - s["blocks_reused"] for s in sessions)


def step(model: ORTModule, rows: int) -> torch.Tensor:
    loss = model(torch.randn(rows, INPUTS, requires_grad=True), torch.arange(rows) % 7)
    loss.backward()
    for p in model.parameters():
        p.grad = None
    return loss


@pytest.mark.parametrize("before, after", [(300, 500), (500, 300), (500, 500), (2000, 300), (300, 2000)])
def test_shapes_that_are_gone_make_way(before: int, after: int):
    model = ORTModule(WithLoss())
    for rows in [before] * 5 + [after] * WARM:
        step(model, rows)
    count = made_anew(model)
    for _ in range(STEPS):
        step(model, after)
    assert made_anew(model) == count


def test_what_a_script_holds():
    """The name that keeps the last step's loss until it is bound again, as in most training loops: at most these few
    bytes, which are more than was live before, are had anew."""
    model = ORTModule(WithLoss())
    for _ in range(WARM):
        loss = step(model, 500)
    count = made_anew(model)
    for _ in range(STEPS):
        loss = step(model, 500)
    assert made_anew(model) - count <= STEPS and loss.isfinite()


class OfTokens(WithLoss):
    """The labels of a batch of sequences, of which the engine counts those that it needs."""

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(torch.tanh(self.layer(x))[:, :1] * x), t.view(5, -1).view(-1))


def test_counts_of_rows_leave_no_gradient_out():
    """A count is freed before the gradients are there: its bytes are beyond the most that is live at once."""
    _C.disable_passes(["+pack_rows"])
    try:
        model = ORTModule(OfTokens())
        for _ in range(WARM):
            step(model, 500)
        count = made_anew(model)
        for _ in range(STEPS):
            step(model, 500)
    finally:
        _C.disable_passes([])
    [stats] = [program.session.stats() for _, known in model._all_programs() for program in known]
    assert stats["probe_runs"] >= WARM
    assert made_anew(model) == count


def test_two_sizes_in_turns():
    """The last batch of an epoch is a smaller one: what the others need stays."""
    model = ORTModule(WithLoss())
    for i in range(WARM):
        step(model, 500 if i % 5 else 300)
    count = made_anew(model)
    for i in range(STEPS):
        step(model, 500 if i % 5 else 300)
    assert made_anew(model) - count <= 2 * STEPS  # of four a step


def offered() -> int:
    """Bytes of this process that the system may take without asking."""
    return sum(1024 * int(line.split()[1]) for line in SMAPS.read_text().splitlines() if line.startswith("LazyFree:"))


@pytest.mark.skipif(not SMAPS.exists() or "LazyFree:" not in SMAPS.read_text(), reason="no LazyFree in /proc/self/smaps")
def test_idle_memory_is_offered_where_more_is_taken():
    """Scores that are gone before their gradient is there: the system may have their pages once the pool takes fresh
    memory, and a step that takes none does not offer them."""
    model, x = ORTModule(nn.Linear(64, 9000)), torch.randn(900, 64)
    scores = 900 * 9000 * 4

    def step() -> None:
        y = model(x)
        z = y * 1.0  # keeps nothing of y for backward
        del y
        z.backward(torch.zeros_like(z))
        model.zero_grad()

    before = offered()
    step()
    assert offered() - before > scores * 9 // 10
    for _ in range(STEPS):
        step()
    assert offered() - before < scores // 10
