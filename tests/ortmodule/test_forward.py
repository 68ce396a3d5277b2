"""A forward that a library sets on the wrapper: it reaches the engine, or is counted and said. No step is in neither."""

import copy
import functools
import logging
import types

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.fc(x))


def add_fused_head(model):
    """As trl does: `model(x, fused=True)` is a loss, computed from the parts; without it, the forward as it was."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def fused_forward(self, *args, fused=False, **kwargs):
        if not fused:
            return original(*args, **kwargs)
        return self.head(self.fc(*args, **kwargs).relu()).square().mean()

    model.forward = types.MethodType(fused_forward, model)


def steps(model):
    counts = onnxtrain.stats(model)
    return counts["engine_steps"], counts["fallback_steps"]


@pytest.fixture
def nets():
    torch.manual_seed(0)
    eager = Net()
    return eager, ORTModule(copy.deepcopy(eager)), torch.randn(3, 4)


def test_one_that_does_not_come_to_the_wrappers_own_becomes_the_modules(nets, caplog):
    eager, model, x = nets
    add_fused_head(eager), add_fused_head(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            eager.zero_grad(), model.zero_grad()
            ours, want = model(x, fused=True), eager(x, fused=True)
            torch.testing.assert_close(ours, want)
            ours.backward(), want.backward()
            torch.testing.assert_close(model.fc.weight.grad, eager.fc.weight.grad)
    assert steps(model) == (3, 1) and onnxtrain.stats(model)["exports"] == 1
    said = [record.message for record in caplog.records if "does not call its own forward" in record.message]
    assert len(said) == 1 and "fused_forward" in said[0]
    assert any("fused_forward" in reason for reason in onnxtrain.stats(model)["reasons"])
    for _ in range(2):  # and the forward that it found is the module's former one
        torch.testing.assert_close(model(x), eager(x))
    assert steps(model) == (5, 1)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.fc.weight.zero_(), eager.fc.weight.zero_()
    torch.testing.assert_close(copied(x, fused=True), eager(x, fused=True))
    del model.forward
    torch.testing.assert_close(model(x), model.module.head(model.module.fc(x)))
    assert steps(model) == (6, 1)


def test_a_method_of_the_wrapper_is_one_of_the_module(nets):
    _, model, x = nets

    def doubled(self, x):
        return 2 * self.head(self.fc(x))

    model.forward = types.MethodType(doubled, model)
    for _ in range(3):
        torch.testing.assert_close(model(x), 2 * model.module.head(model.module.fc(x)))
    assert steps(model) == (3, 0) and onnxtrain.stats(model)["exports"] == 1


def test_one_that_comes_to_the_wrappers_own_only_at_times(nets):
    _, model, x = nets
    inner, direct = model.forward, []
    model.forward = lambda x: model.module.fc(x) if direct else inner(x)
    model(x)
    assert steps(model) == (1, 0)
    direct.append(1)
    model(x)
    assert steps(model) == (1, 1)
    model(x)
    direct.clear()
    torch.testing.assert_close(model(x), model.head(model.fc(x)))
    assert steps(model) == (3, 1)


def test_one_that_takes_itself_away_is_counted_and_said(nets, caplog):
    """As lightning sends a call of training_step through the wrapper's forward."""
    _, model, x = nets
    inner = model.forward

    def redirected(x):
        model.forward = inner
        return model.module.fc(x)

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            model.forward = redirected
            torch.testing.assert_close(model(x), model.module.fc(x))
    assert steps(model) == (0, 3)
    assert sum("does not call its own forward" in record.message for record in caplog.records) == 1
    torch.testing.assert_close(model(x), model.module(x))
    assert steps(model) == (1, 3)


class Keeping:
    """Runs the forward that it found for the first size, and gives parts of what it kept for the others."""

    def __init__(self, forward):
        self.forward, self.kept, self.columns, self.turn = forward, [], 2, 0

    def __call__(self, x):
        if self.columns == 2:
            self.kept.append(self.forward(x))
        self.turn += 1
        return self.kept[self.turn - 1][:, :self.columns]


@pytest.mark.parametrize("hold", [lambda forward: Keeping(forward), lambda forward: functools.partial(Keeping(forward)),
                                  lambda forward: Keeping([forward][0]).__call__,
                                  lambda forward: Keeping(functools.partial(forward))],
                         ids=["object", "partial", "method", "of a partial"])
def test_a_decorator_that_keeps_results(nets, hold):
    eager, model, x = nets

    def step(m):
        original, loss = m.forward, 0
        m.forward = decorator = hold(original)
        keeping = next(value for value in (decorator, getattr(decorator, "func", None),
                                           getattr(decorator, "__self__", None)) if isinstance(value, Keeping))
        for keeping.columns in (2, 1):
            keeping.turn = 0
            loss = loss + (m(x) - m(x + 1)).square().mean()
        m.forward = original
        loss.backward()
        return loss

    for _ in range(3):
        torch.testing.assert_close(step(model), step(eager))
        torch.testing.assert_close(model.fc.weight.grad, eager.fc.weight.grad)
    assert steps(model) == (6, 0) and onnxtrain.stats(model)["exports"] == 1


def test_parts_that_a_set_forward_computes_are_seen_later_too(nets):
    """The first calls come to the engine, the later ones do not."""
    eager, model, x = nets
    add_fused_head(eager), add_fused_head(model)
    for fused in (False, False, True, True, False):
        ours, want = model(x, fused=fused), eager(x, fused=fused)
        torch.testing.assert_close(ours, want)
        ours.sum().backward(), want.sum().backward()
        torch.testing.assert_close(model.fc.weight.grad, eager.fc.weight.grad)
    assert sum(steps(model)) == 5 and steps(model)[1] == 1
