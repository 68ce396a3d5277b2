"""Modules whose shapes, branches and loops depend on data, through ORTModule: in the engine, equal to eager."""

from __future__ import annotations

import copy
import math

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


class Pooled(nn.Module):
    """The sum of each group's rows; how many groups there are, Python's int() reads from the tensor."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, group):
        groups = int(group.max()) + 1
        return x.new_zeros(groups, 4).index_add(0, group, self.fc(x))


class FirstHalf(Pooled):
    """A whole number that may be negative, halved and rounded down; and one that decides nothing but a factor."""

    def forward(self, x, n):
        return self.fc(x)[: int(n) // 2] * (int(n) % 3)


class Kinds(Pooled):
    """`int` is also read where it is not called."""

    def forward(self, x, n):
        assert isinstance(3, int) and int is int and 0 == 0 and int("11", 2) == 3
        return self.fc(x) * int(n) * sum(map(int, "12"))


@pytest.mark.parametrize("kind, numbers", [(Pooled, ([0, 1, 1, 2, 0, 2], [0, 0, 0, 1, 1, 1], [3, 0, 1, 1, 2, 2],
                                                     [0, 0, 0, 0, 0, 0])),
                                           (FirstHalf, (5, 4, -1, -4, 0)), (Kinds, (2, 1, 0, -3))])
def test_int_of_a_tensor(kind, numbers):
    torch.manual_seed(0)
    eager = kind()
    ours = ORTModule(copy.deepcopy(eager))
    code = kind.forward.__code__
    for number in numbers:
        number, x = torch.tensor(number), torch.randn(6, 4)
        expected, got = eager(x, number), ours(x, number)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for module, y in ((eager, expected), (ours, got)):
            module.zero_grad()
            y.square().sum().backward()
        for p, q in zip(eager.parameters(), ours.parameters()):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-5)
    counts = onnxtrain.stats(ours)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (len(numbers), 0, 1), counts
    assert kind.forward.__code__ is code


class Counted(nn.Module):
    """What Python makes of how many entries are positive."""

    def __init__(self, count):
        super().__init__()
        self.fc, self.count = nn.Linear(4, 4), count

    def forward(self, x):
        return self.fc(x).sum() * self.count(x)


READ = {
    "len": lambda x: len(x[x > 0]),
    "branch": lambda x: 2 if x[x > 0].shape[0] > 1 else 3,
    "no entry": lambda x: 2 if (x > 0).nonzero().numel() == 0 else 3,
    "range": lambda x: sum(x.sum() + i for i in range(torch.masked_select(x, x > 0).size(0))),
    "of parts": lambda x: sum(len(part) * i for i, part in enumerate((x[x > 0] * 2).split(2))),
    "iteration": lambda x: sum(i * y for i, y in enumerate(x[x > 0].relu())),
    "where": lambda x: len(torch.where(x > 0)[0]),
    "unique": lambda x: sum(i * n for i, n in enumerate((x > 0).sum(1).unique())),
    "length": lambda x: 2 if torch.zeros((x > 0).nonzero().shape[0]).numel() > 3 else 3,
}


@pytest.mark.parametrize("name", READ)
def test_counts_of_contents_are_not_frozen(name):
    ours = ORTModule(Counted(READ[name]))
    for shift in (0, 3, -9, 1, 9):
        x = torch.arange(-6.0, 6.0).view(3, 4) + shift
        torch.testing.assert_close(ours(x), ours.module(x))


def test_int_of_a_fraction():
    ours = ORTModule(Counted(lambda x: int(x.relu().sum())))
    for shift in (0, 3):
        x = torch.arange(-6.0, 6.0).view(3, 4) + shift
        torch.testing.assert_close(ours(x), ours.module(x))


class Padded(nn.Module):
    """Boxes of images, as many for each as the most that one has. `how` says what is done with that number."""

    def __init__(self, how):
        super().__init__()
        self.fc, self.how, self.most = nn.Linear(4, 4), how, 0

    def forward(self, x, owners):
        boxes = torch.zeros(x.shape[0], owners.long().max(), 4) + x.unsqueeze(1)
        if self.how == "branches" and boxes.shape[1] == 0:
            return self.fc(x).sum()
        if self.how == "keeps it":
            self.most = boxes.shape[1]
        return (self.fc(x) * boxes.sum(1) / boxes.shape[1]).sum()


@pytest.mark.parametrize("how, exports", [("keeps it", 1), ("branches", 3)])
def test_a_size_from_contents_that_python_reads(how, exports):
    torch.manual_seed(0)
    eager = Padded(how)
    model = ORTModule(copy.deepcopy(eager))
    for most in (2.0, 3.0, 6.0, 4.0):
        x, owners = torch.randn(2, 4), torch.tensor([1.0, most])
        for run in (eager, model):
            run.zero_grad()
            run(x, owners).backward()
        assert model.module.most == eager.most and type(model.module.most) is int
        torch.testing.assert_close(model.module.fc.weight.grad, eager.fc.weight.grad)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (4, 0, exports), counts["reasons"]


def test_a_number_of_rows_that_python_keeps():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.rows = nn.Linear(4, 4), 0

        def forward(self, x):
            chosen = x[x[:, 0] > 0]
            self.rows = chosen.shape[0]
            return self.fc(chosen).sum()

    eager = Rows()
    model = ORTModule(copy.deepcopy(eager))
    for rows in (5, 7, 6):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), eager(x))
        assert model.module.rows == eager.rows == int((x[:, 0] > 0).sum())
    assert onnxtrain.stats(model)["engine_steps"] == 3


@pytest.mark.parametrize("use", [
    lambda x, number: x * (0.9 * 2.5 + 0.1 * number), lambda x, number: x * max(number, 0.5) / (min(number, 0.25) + 1e-8),
    lambda x, number: x * math.sqrt(number + 1), lambda x, number: x * (1 / (number + 2)) + number % 0.3,
    lambda x, number: x * torch.tensor([number, number * 2, 1.0, 0.0]), lambda x, number: x * int(number * 10),
    lambda x, number: nn.functional.leaky_relu(x, number * 0.1).double() * number])
def test_a_number_of_float32_beside_constants(use):
    """item() is Python's number, in double precision."""
    class Averaged(Masked):
        def forward(self, x):
            return use(self.fc(x), x.abs().mean().item()).sum()

    torch.manual_seed(0)
    eager = Averaged()
    model = ORTModule(copy.deepcopy(eager))
    for rows in (2, 3, 2):
        x = torch.randn(rows, 4)
        for module in (eager, model):
            module.zero_grad()
        results = [module(x) for module in (model, eager)]
        torch.testing.assert_close(*results)
        for result in results:
            result.backward()
        torch.testing.assert_close(model.fc.weight.grad, eager.fc.weight.grad)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["reasons"]) == (3, []) and counts["exports"] <= 2


def sliced(m, x, lengths):
    return torch.stack([m.fc(x)[row, :length].sum() for row, length in enumerate(lengths.tolist())])


def moved(m, x, lengths):
    h = m.fc(x)
    first = [int(place) for place in h.argmax(-1).tolist()][0]
    return nn.functional.pad(h[:, first:], (first, 0))


@pytest.mark.parametrize("use", [sliced, moved])
def test_entries_of_tolist_as_bounds(use):
    class Net(Masked):
        def forward(self, x, lengths):
            return use(self, x, lengths)

    torch.manual_seed(0)
    eager = Net()
    model = ORTModule(copy.deepcopy(eager))
    for _ in range(6):
        x, lengths = torch.randn(3, 4), torch.randint(1, 4, (3,))
        for module in (eager, model):
            module.zero_grad()
            result = module(x, lengths)
            result.square().sum().backward()
        torch.testing.assert_close(result, eager(x, lengths))
        torch.testing.assert_close(model.fc.weight.grad, eager.fc.weight.grad)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] >= 5 and counts["reasons"] == []
    assert all(f"in {__file__}, line " in cut for cut in counts["graph_breaks"])
