"""What models of speech and mixtures of experts need, each alone: in the engine, equal to eager, gradients too."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule

TARGETS = torch.tensor([[1, 2, 2], [3, 1, 0], [2, 0, 0]])
LENGTHS = torch.tensor([3, 2, 1])


def ctc(**options):
    def loss(m, x):
        rows = m.fc(x).log_softmax(-1).transpose(0, 1)  # (T, N, C)
        return F.ctc_loss(rows, TARGETS, torch.tensor([7, 6, 7]), LENGTHS, **options)

    return loss


def ctc_in_a_row(m, x):
    kept = TARGETS[TARGETS > 0]
    return torch.ctc_loss(m.fc(x).log_softmax(-1).transpose(0, 1), kept, torch.full((3,), 7), LENGTHS, 0, 1, True)


def ctc_of_one(m, x):
    return F.ctc_loss(m.fc(x[0]).log_softmax(-1), TARGETS[0], torch.tensor(7), torch.tensor(3), reduction="none")


def ctc_of_numbers(m, x):
    return F.ctc_loss(m.fc(x).log_softmax(-1).transpose(0, 1), TARGETS, (7, 7, 2), (3, 2, 1), blank=3, reduction="sum")


def selected(m, x):
    return torch.masked_select(m.fc(x), x > 0).square()


def selected_by_row(m, x):
    return torch.masked_select(m.fc(x), x[0] > 0).square() + torch.masked_select(x[0, 0], m.fc(x).abs() > 9).sum()


def wants_a_gradient(m, x):
    rows = x[:, None]
    rows.requires_grad = True
    return m.fc(rows.clone().requires_grad_())


FORWARDS = {
    "ctc": ctc(), "ctc sum": ctc(reduction="sum"), "ctc none": ctc(reduction="none", zero_infinity=True),
    "ctc in a row": ctc_in_a_row, "ctc of one": ctc_of_one, "ctc of numbers": ctc_of_numbers,
    "selected": selected, "selected by row": selected_by_row, "wants a gradient": wants_a_gradient,
}


class Of(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.fc, self.norm, self.group = nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FORWARDS)
def test_equals_eager(name):
    torch.manual_seed(0)
    eager = Of(FORWARDS[name])
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(2):
        x = torch.randn(3, 7, 4)
        results = []
        for module in (eager, ours):
            module.zero_grad()
            results.append(module(x))
            results[-1].sum().backward()
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(gradients(ours), gradients(eager))
    counts = onnxtrain.stats(ours)
    assert counts["engine_steps"] == 2 and counts["fallback_steps"] == 0, counts["reasons"]


@pytest.mark.parametrize("forward", [
    lambda m, x: m.norm(F.linear(x, m.fc.weight)), lambda m, x: m.group(F.linear(x, m.fc.weight).transpose(1, 2)),
], ids=["layer_norm", "group_norm"])
def test_norms_of_16_bit_rows(forward):
    """Their weights stay float32 under autocast."""
    torch.manual_seed(0)
    eager, x = Of(forward), torch.randn(3, 7, 4)
    ours = ORTModule(copy.deepcopy(eager))
    results = []
    for module in (eager, ours):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(module(x))
        results[-1].float().square().sum().backward()
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0.01)  # two roundings of a row to 8 bits
    torch.testing.assert_close(gradients(ours), gradients(eager), rtol=0.03, atol=0.1)
    assert onnxtrain.stats(ours)["engine_steps"] == 1


def test_an_input_that_must_not_want_a_gradient():
    """Comparison with eager, where inputs get one, does without."""
    def forward(m, x):
        rows = x[:, None]
        rows.requires_grad = True
        return m.fc(torch.linalg.cross(rows[..., :3], rows[..., 1:]).repeat(1, 1, 1, 2)[..., :4])

    eager, x = Of(forward), torch.randn(3, 7, 4)
    ours = ORTModule(copy.deepcopy(eager))
    torch.testing.assert_close(ours(x), eager(x))
    assert onnxtrain.stats(ours)["engine_steps"] == 1
