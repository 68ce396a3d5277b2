"""torch.multinomial draws what PyTorch draws for the same seed: torch runs it, between two segments of the engine."""

import copy

import pytest
import torch
import torch.nn as nn
from agree import in_engine

from onnxtrain.ortmodule import ORTModule


class Drawing(nn.Module):
    def __init__(self, count, replacement):
        super().__init__()
        self.fc, self.count, self.replacement = nn.Linear(5, 5), count, replacement

    def forward(self, x):
        odds = self.fc(x).softmax(-1)
        drawn = torch.multinomial(odds, self.count, self.replacement)
        return odds.gather(-1, drawn).log() * 2, drawn


@pytest.mark.parametrize("count, replacement", [(1, False), (1, True), (3, False), (5, False), (7, True)])
@pytest.mark.parametrize("shape", [(5,), (4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_draws_what_pytorch_draws(dtype, shape, count, replacement, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    torch.manual_seed(0)
    eager = Drawing(count, replacement).to(dtype)
    ours = ORTModule(copy.deepcopy(eager))
    for seed in range(3):
        x, results = torch.rand(shape, dtype=dtype), []
        for model in (eager, ours):
            torch.manual_seed(seed)
            model.zero_grad()
            given = x.clone().requires_grad_(True)
            scores, drawn = model(given)
            scores.sum().backward()
            results.append((drawn, scores.detach(), given.grad, model.fc.weight.grad, torch.get_rng_state()))
        for a, b in zip(*results):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
        assert torch.equal(results[0][0], results[1][0]) and results[1][0].dtype == torch.int64
    in_engine(ours, 3)


def test_two_draws_in_a_row_and_without_gradient():
    class Twice(nn.Module):
        def forward(self, odds):
            return torch.multinomial(odds, 2), torch.multinomial(odds * odds, 4, True)

    model, odds = ORTModule(Twice()), torch.rand(6, 9)
    for rows in (6, 4):
        torch.manual_seed(3)
        want = model.module(odds[:rows])
        torch.manual_seed(3)
        with torch.no_grad():
            got = model(odds[:rows])
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    in_engine(model, 2)


def test_odds_that_are_none_are_refused_as_pytorch_refuses_them():
    class Plain(nn.Module):
        def forward(self, odds):
            return torch.multinomial(odds * 1, 2)

    model = ORTModule(Plain())
    model(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="probability tensor contains either|invalid multinomial distribution"):
        model(torch.tensor([[1.0, -1.0, 2.0]]))
