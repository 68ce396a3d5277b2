"""A deque(maxlen=...) that the module holds, or that forward fills: equal to eager, where Dynamo would forget its
length."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = [torch.randn(2 + i % 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(8)]


class Net(nn.Module):
    def __init__(self, use, most=3):
        super().__init__()
        self.fc, self.use, self.recent = nn.Linear(4, 4), use, collections.deque(maxlen=most)

    def forward(self, x):
        return self.use(self, x, self.fc(x).square().sum())


def held(deque):
    return [item.detach() if isinstance(item, torch.Tensor) else item for item in deque], deque.maxlen


def stats(use, most=3, change=lambda m, call: None):
    """stats() after steps, each with eager's loss and gradients, and eager's items in the deque."""
    torch.manual_seed(0)
    eager = Net(use, most)
    model = ORTModule(copy.deepcopy(eager))
    for call, x in enumerate(X):
        losses = []
        for module in (eager, model):
            change(module, call)
            module.zero_grad()
            losses.append(module(x))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(model.fc.weight.grad, eager.fc.weight.grad)
        torch.testing.assert_close(held(model.recent), held(eager.recent))
    return onnxtrain.stats(model)


def window(m, x, loss):
    m.recent.append(x.mean(0))
    return loss * torch.stack(tuple(m.recent)).sum()


def at_the_left(m, x, loss):
    m.recent.appendleft(x.mean())
    m.recent.extendleft([x.sum(), x.amax()])
    return loss * m.recent[-1] * m.recent[0]


def full(m, x, loss):
    loss = loss * 2 if len(m.recent) == m.recent.maxlen else loss
    m.recent.extend([x.mean(), x.sum()])
    m.recent[0] = m.recent[0] * 2
    return loss * sum(m.recent)


def taken(m, x, loss):
    m.recent += [x.mean(), x.sum(), x.amax(), x.amin()]
    return loss * m.recent.popleft() * m.recent.pop()


def copied(m, x, loss):
    m.recent = m.recent.copy()
    m.recent.append(x.mean())
    return loss * sum(m.recent)


def made(m, x, loss):
    m.recent = collections.deque(m.recent, maxlen=2)
    m.recent.append(x.mean())
    return loss * sum(m.recent)


def average(m, x, loss):
    """Of numbers, as a running loss is one."""
    m.recent.append(loss.item())
    return loss * (sum(m.recent) / len(m.recent))


def unread(m, x, loss):
    return loss * 2


@pytest.mark.parametrize("use", [window, at_the_left, full, taken, copied, made, average])
def test_steps_around_a_cut(use):
    counts = stats(use)
    assert counts["graph_breaks"] and all(f"a deque(maxlen=...), in {__file__}, line " in reason
                                          for reason in counts["graph_breaks"])


def test_one_that_forward_does_not_read_is_no_hindrance():
    counts = stats(unread)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["graph_breaks"]) == (8, 0, [])


def test_an_end_that_is_another_one():
    def change(m, call):
        if call == 4:
            m.recent = collections.deque(m.recent, maxlen=2)

    stats(window, 2, change), stats(full, 3, change)


def test_the_object_stays():
    model = ORTModule(Net(window))
    recent = model.recent
    for x in X:
        model(x)
    assert model.recent is recent and len(recent) == 3


def test_a_class_of_its_own():
    class Recent(collections.deque):
        pass

    def change(m, call):
        if call == 0:
            m.recent = Recent(maxlen=2)

    assert "a deque(maxlen=...), in " in stats(window, 2, change)["graph_breaks"][0]
