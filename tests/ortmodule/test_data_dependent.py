"""Modules whose shapes, branches and loops depend on data, through ORTModule: in the engine, equal to eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Masked(nn.Module):
    """A mean over the rows that a condition picks."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)
        return h[x[:, 0] > 0].sum() + h.mean()


class NonZeroEntries(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        h, at = self.fc(x), torch.nonzero(x > 0)
        return h[at[:, 0], at[:, 1]].pow(2)


class UniqueTokens(nn.Module):
    """Each token is embedded once."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids):
        tokens, inverse = torch.unique(ids, return_inverse=True)
        return self.table(tokens)[inverse]


class Experts(nn.Module):
    """Rows go to the expert that scores highest."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        route, y = self.score(x).argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = torch.where(route == k)[0]
            y = y.index_add(0, rows, expert(x[rows]))
        return y


class Recurrence(nn.Module):
    """torch's scan: a Scan in the graph."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        from torch._higher_order_ops.scan import scan

        state, rows = scan(lambda c, v: ((c * 0.5 + v).tanh(), (c + v).clone()), torch.zeros(4), self.fc(x), dim=0)
        return state + rows.sum(0)


class Repeated(nn.Module):
    """torch's while_loop: a Loop in the graph."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        from torch._higher_order_ops.while_loop import while_loop

        _, x = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin() * 2), (torch.tensor(0), x))
        return self.fc(x)


@pytest.mark.parametrize("kind", [Masked, NonZeroEntries, UniqueTokens, Experts, Recurrence, Repeated])
def test_step_equals_eager(kind):
    torch.manual_seed(0)
    eager = kind()
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(4):
        x = torch.randint(0, 10, (7,)) if kind is UniqueTokens else torch.randn(6 + step % 2, 4)
        for module in (eager, ours):
            module.zero_grad()
        expected, got = eager(x), ours(x)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        expected.sum().backward()
        got.sum().backward()
        for (name, p), q in zip(eager.named_parameters(), ours.parameters()):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-5, msg=name)
    counts = onnxtrain.stats(ours)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    assert counts["engine_steps"] == 4
