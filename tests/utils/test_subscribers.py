"""Subscribers of activations: the same calls, in the same order, from eager PyTorch and from the engine."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.utils.hooks import GlobalSubscriberManager, SubscriberBase, inspect_activation


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)

    def forward(self, x):
        h = inspect_activation("hidden", self.act(self.fc1(x)))
        return self.fc2(h), h


NAMES = ["Linear_1_0th_output", "ReLU_2_0th_output", "hidden", "Linear_3_0th_output", "Net_0_0th_output",
         "Net_0_1th_output"]


class Recorder(SubscriberBase):
    def __init__(self, **limits):
        super().__init__(**limits)
        self.seen = {}

    def forward_activation(self, name, tensor, step):
        self.seen[name, step, "forward"] = tensor.clone()

    def backward_activation(self, name, gradient, step):
        self.seen[name, step, "backward"] = gradient.clone()


@pytest.fixture(autouse=True)
def unsubscribed():
    yield
    GlobalSubscriberManager.unsubscribe()


def recorded(net, wrap, batches, **limits):
    """(subscriber, gradients of the first weight, the model) after a step for each batch."""
    net, recorder = copy.deepcopy(net), Recorder(**limits)
    GlobalSubscriberManager.subscribe(net, [recorder])
    model = ORTModule(net) if wrap else net
    for batch in batches:
        y, h = model(batch)
        (y.sum() + h.square().sum()).backward()
    return recorder, net.fc1.weight.grad, model


def test_the_engine_shows_what_eager_shows():
    torch.manual_seed(0)
    net, batches = Net(), [torch.randn(4, 3) for _ in range(3)]
    eager, expected, _ = recorded(net, False, batches)
    ours, gradient, model = recorded(net, True, batches)
    assert set(eager.seen) == set(ours.seen) == {
        (name, step, way) for name in NAMES for step in range(3) for way in ("forward", "backward")}
    for place, value in eager.seen.items():
        torch.testing.assert_close(ours.seen[place], value)
    torch.testing.assert_close(gradient, expected)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (3, 0)


def test_steps_are_limited_and_a_subscription_ends_with_the_next():
    net = Net()
    recorder, _, _ = recorded(net, True, [torch.ones(2, 3)] * 4, start_step=1, end_step=3)
    assert {step for _, step, _ in recorder.seen} == {1, 2}
    other = Net()
    GlobalSubscriberManager.subscribe(other, [last := Recorder()])
    assert not net._forward_hooks
    other(torch.ones(2, 3))
    assert ("hidden", 0, "forward") in last.seen
    GlobalSubscriberManager.unsubscribe()
    assert not other._forward_hooks and not other._forward_pre_hooks


def test_a_forward_that_raises_ends_with_its_subscription():
    net = Net()
    GlobalSubscriberManager.subscribe(net, [Recorder()])
    with pytest.raises(RuntimeError):
        net(torch.ones(2, 5))
    GlobalSubscriberManager.unsubscribe()
    x = torch.ones(2)
    assert inspect_activation("x", x) is x


def test_a_plain_tensor_outside_of_a_subscribed_module_is_returned():
    x = torch.ones(2)
    assert inspect_activation("x", x) is x
    with pytest.raises(TypeError, match="x"):
        inspect_activation("x", 1.0)
    with pytest.raises(TypeError, match="SubscriberBase"):
        GlobalSubscriberManager.subscribe(Net(), [object()])
    with pytest.raises(TypeError, match="Module"):
        GlobalSubscriberManager.subscribe(object(), [])
