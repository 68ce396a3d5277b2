"""Checks in forward that read values and raise: the graph has them, and PyTorch runs the call for which one fails.

PYTEST_DONT_REWRITE: pytest would make other code of the assertions in these modules.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn as nn
from agree import RECENT
from torch.utils.checkpoint import checkpoint

import onnxtrain
from onnxtrain import dynamo
from onnxtrain.ortmodule import ORTModule


class Checked(nn.Module):
    """Every shape of a check: a comparison, an assert, a negation, parts of a condition, an else."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, labels=None):
        if labels is not None and labels.max() >= 4:
            raise ValueError("a label is too large")
        assert x.isfinite().all(), "not finite"
        if not (x.min() > -100) or bool((x > 100).any()):
            raise RuntimeError("out of range")
        if x.abs().sum() > 0:
            self.seen.add_(1)
        else:
            raise RuntimeError("all zero")
        return torch.dropout(self.fc(x), 0.5, self.training).sum()


X, LABELS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 1])


@pytest.mark.parametrize("x, labels, error, text", [
    (X, torch.tensor([0, 4, 1]), ValueError, "a label is too large"),
    (X / 0, LABELS, AssertionError, "not finite"),
    (X - 200, LABELS, RuntimeError, "out of range"),
    (X + 200, LABELS, RuntimeError, "out of range"),
    (X * 0, LABELS, RuntimeError, "all zero"),
], ids=["label", "finite", "below", "above", "zero"])
def test_a_check_fires(x, labels, error, text):
    model = ORTModule(Checked())
    for _ in range(2):
        model(X, LABELS).backward()
    before = torch.get_rng_state()
    seen = model.seen.clone()
    with pytest.raises(error, match=text):
        model(x, labels)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(model.seen, seen)
    model(X, LABELS).backward()
    assert onnxtrain.stats(model)["engine_steps"] >= 3


def test_the_first_call_fires():
    model = ORTModule(Checked())
    with pytest.raises(ValueError, match="a label is too large"):
        model(X, torch.tensor([9, 9, 9]))
    model(X, LABELS)
    assert onnxtrain.stats(model)["engine_steps"] == 1


def test_steps_equal_eager():
    eager = Checked().eval()
    model = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        x = torch.randn(5, 4)
        for module in (eager, model):
            module.zero_grad()
            module(x).backward()
        torch.testing.assert_close(model.fc.weight.grad, eager.fc.weight.grad)
        assert model.seen == eager.seen
    assert onnxtrain.stats(model)["engine_steps"] == 3


class Classified(nn.Module):
    """The engine itself refuses what the check is there for."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, labels):
        if (labels >= 4).any():
            raise ValueError("a label is too large")
        return nn.functional.cross_entropy(self.fc(x), labels)


def test_the_users_own_exception_comes_first():
    model = ORTModule(Classified())
    model(X, LABELS)
    with pytest.raises(ValueError, match="a label is too large"):
        model(X, torch.tensor([0, 7, 1]))


class Caught(nn.Module):
    """What is raised is caught again inside."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        try:
            if x.sum() > 1000:
                raise OverflowError
        except OverflowError:
            return self.fc(x / 1000).sum()
        return self.fc(x).sum()


def test_an_exception_that_forward_catches():
    eager = Caught()
    model = ORTModule(copy.deepcopy(eager))
    for x in (X, X + 1000, X):
        torch.testing.assert_close(model(x), eager(x))


class Sized(nn.Module):
    """Sizes made of contents: a negative one would leave nothing of the tensor."""

    def forward(self, x, n):
        first, count, last, rows = int(n[0]), int(n[1]), n[2].item(), int(n[3])
        narrow = x.narrow(0, first, count)
        return narrow * 2, torch.arange(1, last) * x.sum(), torch.eye(rows, 2), torch.arange(last, 3, -1)


def test_sizes_made_of_contents():
    model, x = ORTModule(Sized()), X.clone().requires_grad_(True)
    for good in ((0, 2, 4, 1), (-3, 3, 5, 2), (3, 0, 3, 0)):
        for got, want in zip(model(x, torch.tensor(good)), Sized()(x, torch.tensor(good)), strict=True):
            assert torch.equal(got, want)
    counts = onnxtrain.stats(model)
    assert (counts["exports"], counts["engine_steps"]) == ((1, 3) if RECENT else (0, 0))
    for sizes in ((-4, 1, 4, 1), (0, -1, 4, 1), (0, 4, 4, 1), (2, 2, 4, 1), (0, 1, 0, 1), (0, 1, 2, 1), (0, 1, 4, -1)):
        with pytest.raises((RuntimeError, IndexError)) as eager:
            Sized()(x, torch.tensor(sizes))
        with pytest.raises(type(eager.value), match=re.escape(str(eager.value))):
            model(x, torch.tensor(sizes))


@pytest.mark.parametrize("forward", [
    lambda m, x: m.fc(x) if x.sum() > 0 else m.fc(-x),
    lambda m, x: m.fc(x if (x > 0).any() and x.sum() < 3 else -x),
], ids=["branch", "part of a branch"])
def test_other_branches_are_pythons(forward):
    class Branch(Classified):
        def forward(self, x):
            return forward(self, x)

    model = ORTModule(Branch())
    for x in (X, -X, X + 100, X):
        torch.testing.assert_close(model(x), model.module(x))
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] >= 2 and counts["engine_steps"] + counts["fallback_steps"] == 4


def positive(x):
    assert bool((x > 0).all()), "not positive"
    return x * 2


def below(x):
    assert x.max().item() < 100.0, "too large"
    return x * 2


def checked_by_torch(x):
    torch._check(int(x.min()) > 0)
    return x * 2


def few(x):
    assert x.long().max().item() < 50
    return x * 2


@pytest.mark.parametrize("check, wrong", [(few, 70.0), (positive, -1.0), (below, 100.0), (checked_by_torch, -1.0)])
def test_a_check_of_a_number_that_a_tensor_held(check, wrong):
    """Dynamo has it as a condition of a graph's numbers, without the exception: such a capture is given up."""
    class Module(nn.Linear):
        def forward(self, x):
            return check(x) + super().forward(x)

    torch.manual_seed(0)
    eager = Module(4, 4)
    model = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        x = torch.rand(2, 4) + 1
        torch.testing.assert_close(model(x), eager(x))
    with pytest.raises((AssertionError, RuntimeError)) as expected:
        eager(torch.full((2, 4), wrong))
    with pytest.raises(expected.type):
        model(torch.full((2, 4), wrong))
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] >= 2  # the first may be PyTorch's


@pytest.mark.parametrize("function", [
    torch.linalg.inv, torch.linalg.cholesky, lambda a: torch.linalg.solve(a, torch.eye(4)), torch.inverse],
    ids=["inv", "cholesky", "solve", "inverse"])
def test_a_matrix_without_a_result(function):
    class Solved(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return function(x * self.fc.weight.sum())

    eager = Solved()
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(2):
        results = []
        for model, module in ((eager, eager), (ours, ours._module)):
            module.zero_grad()
            x = torch.eye(4, requires_grad=True)
            y = model(x * eager.fc.weight.sum().detach())
            y.square().sum().backward()
            results.append([y.detach(), x.grad, module.fc.weight.grad])
        for got, want in zip(*reversed(results), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    said = []
    for model in (eager, ours):
        with pytest.raises(torch.linalg.LinAlgError) as error:
            model(torch.zeros(4, 4))
        said.append(str(error.value))
    assert said[0] == said[1]
    counts = onnxtrain.stats(ours)
    assert counts["engine_steps"] == 2 and not counts["graph_breaks"], counts["reasons"]


class Wrong(Exception):
    def __init__(self, what, number):
        super().__init__(f"{what}: {number}")


def rising(module, x, t):
    if not (t[1:] > t[:-1]).all():
        raise ValueError(f"t does not rise: {t.tolist()}, of {tuple(t.shape)}")
    return x


def asserted(module, x, t):
    h = module.first(x)
    assert (t > 0)[0].all()
    return h


def asserted_by_torch(module, x, t):
    torch._assert((t > 0).all(), f"not positive, of {t.shape[0]}")
    return x


def not_a_number(module, x, t):
    def checked(h, name):
        if torch.isnan(h).any():
            raise Wrong(name, len(t))
        return h

    return checked(module.first(x * t.sum().sqrt()), "first")


def in_a_loop(module, x, t):
    with torch.no_grad():
        for i, part in enumerate((t, t * t)):
            if part.min() < 0 or (part > 9).any():
                text = "low" if part.min() < 0 else "high"
                raise RuntimeError(f"part {i}: {text}")
    return x


def numbers(module, x, t):
    if t.max().item() > 9.5 or (t < 0).all().item():
        raise ValueError(t.max().item())
    assert int(t.max()) <= int(t.sum())
    return x


def in_a_checkpoint(module, x, t):
    def region(h):
        h = module.first(h)
        assert t.min() > 0, "not positive"
        return h.tanh()

    return checkpoint(region, x, use_reentrant=False)


class Form(nn.Module):
    def __init__(self, check):
        super().__init__()
        self.check, self.calls = check, 0
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x, t):
        self.calls += 1
        return self.last(self.check(self, self.norm(x), t))


@pytest.mark.parametrize("check", [rising, asserted, asserted_by_torch, not_a_number, in_a_loop, numbers, in_a_checkpoint])
def test_the_graph_has_the_check(check):
    """No cut and one export for all sizes; what a call raises is eager's, and leaves what eager leaves."""
    torch.manual_seed(0)
    eager = Form(check)
    model = ORTModule(copy.deepcopy(eager))
    good, bad = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, -2.0, -30.0])
    for step, (rows, t) in enumerate([(2, good), (3, good), (3, bad), (4, good), (3, bad), (2, good)]):
        x = torch.randn(rows, 4)
        raised = []
        for module in (eager, model):
            module.zero_grad()
            try:
                loss = module(x, t).square().sum()
                loss.backward()
            except Exception as error:
                raised.append((type(error), str(error)))
        assert len(raised) == (2 if t is bad else 0) and raised[:1] == raised[1:]
        assert model.calls == eager.calls == step + 1
        for (name, want), got in zip(eager.named_buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(got, want, msg=name)
        for (name, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
    counts = onnxtrain.stats(model)
    assert counts["graph_breaks"] == []
    assert counts["exports"] <= 1 + (check is in_a_checkpoint)  # which torch 2.10 captures again for a second size
    assert (counts["engine_steps"], counts["fallback_steps"]) == (4, 2)
    assert counts["reasons"] == ["in some calls an assertion in forward fails; PyTorch runs them and raises what forward "
                                 "would raise"]


class Cut(Form):
    def forward(self, x, t):
        assert t.max() < 100, "too large"
        x = self.first(x)
        torch._dynamo.graph_break()
        assert t.min() > 0, "not positive"
        return self.last(x)


def test_before_a_cut_and_behind_it():
    torch.manual_seed(0)
    eager = Cut(None)
    model = ORTModule(copy.deepcopy(eager))
    good = torch.tensor([1.0, 2.0])
    for t in (good, good, -good, good * 100, good):
        results = []
        for module in (eager, model):
            try:
                results.append(module(X, t).tolist())
            except AssertionError as error:
                results.append(str(error))
        assert results[0] == pytest.approx(results[1]) if isinstance(results[0], str) else torch.allclose(
            *map(torch.tensor, results))
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] >= 3 and any("graph_break" in cut for cut in counts["graph_breaks"])
    assert not any("too large" in cut for cut in counts["graph_breaks"])


class Unsupported(Form):
    def forward(self, x, t):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            if t.min() < 0:
                raise ValueError("negative")
        h = self.first(x)
        h.register_hook(lambda grad: grad * 2)
        return self.last(h)


def test_a_graph_that_pytorch_runs_leaves_the_modes():
    model = ORTModule(Unsupported(None))
    for t in (torch.ones(2), -torch.ones(2), torch.ones(2)):
        if t[0] < 0:
            with pytest.raises(ValueError, match="negative"):
                model(X, t)
        else:
            model(X, t).sum().backward()
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_an_assertion_in_another_way():
    """Dynamo's own, which raises a RuntimeError for every backend; and one inside a branch."""
    compiled = torch.compile(Form(asserted), backend=dynamo.backend)
    compiled(X, LABELS + 1.0)
    with pytest.raises(RuntimeError, match="assertion error"):
        compiled(X, LABELS * 0.0)

    class Branching(Form):
        def forward(self, x, t):
            def checked(h):
                assert h.max() < 50, "too large"
                return h * 2

            return self.last(torch.cond(t.sum() > 0, checked, lambda h: h + 0, (x,)))

    model = ORTModule(Branching(None))
    model(X, LABELS)
    with pytest.raises(RuntimeError, match="too large"):
        model(X * 100, LABELS)
