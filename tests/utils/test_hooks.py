"""Subscribers of activations: the same calls and the same statistics from eager PyTorch and from the engine."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber, SubscriberBase, inspect_activation


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


@pytest.mark.parametrize("wrap", [False, True])
def test_statistics_are_files(tmp_path, wrap):
    torch.manual_seed(0)
    net, folder, x = Net(), tmp_path / "out", torch.randn(6, 3)
    GlobalSubscriberManager.subscribe(net, [StatisticsSubscriber(folder, bucket_size=7)])
    model = ORTModule(net) if wrap else net
    for _ in range(2):
        y, h = model(x)
        (y.sum() + h.sum()).backward()
    for step in ("step_0", "step_1"):
        order = (folder / step / "order.txt").read_text().split()
        assert sorted(order) == sorted(f"{name}_{way}" for name in NAMES for way in ("forward", "backward"))
        assert {path.name for path in (folder / step).iterdir()} == {*order, "order.txt"}
        names = ("Linear_1_0th_output_forward", "hidden_forward", "hidden_backward")
        first, second, third = map(order.index, names)
        assert first < second < third
    lines = dict(line.split(": ") for line in (folder / "step_1" / "hidden_forward").read_text().splitlines())
    hidden = net.act(nn.functional.linear(x, net.fc1.weight, net.fc1.bias)).double().detach()
    assert lines["shape"] == "(6, 5)" and lines["dtype"] == "torch.float32"
    for name, value in (("min", hidden.min()), ("max", hidden.max()), ("mean", hidden.mean()), ("std", hidden.std())):
        assert float(lines[name]) == pytest.approx(float(value), rel=1e-6)
    assert int(lines["zero"]) == int((hidden == 0).sum()) and int(lines["positive"]) == int((hidden > 0).sum())
    with pytest.raises(FileExistsError, match="override_output_dir"):
        StatisticsSubscriber(folder)
    StatisticsSubscriber(folder, override_output_dir=True)
    assert not folder.exists()


def test_nan_inf_and_empty_tensors_have_statistics(tmp_path):
    subscriber = StatisticsSubscriber(tmp_path / "out", run_on_cpu=True)
    subscriber.forward_activation("a", torch.tensor([float("nan"), float("inf"), 1.0, 3.0]), 0)
    subscriber.forward_activation("b", torch.empty(0, 2), 0)
    subscriber.forward_activation("c", torch.tensor([-1, 0, 4]), 0)
    read = {name: dict(line.split(": ")
                       for line in (tmp_path / "out" / "step_0" / f"{name}_forward").read_text().splitlines())
            for name in "abc"}
    assert (read["a"]["nan"], read["a"]["inf"], read["a"]["mean"], read["a"]["max"]) == ("1", "1", "2", "3")
    assert read["b"]["shape"] == "(0, 2)" and read["b"]["mean"] == "nan"
    assert (read["c"]["negative"], read["c"]["zero"], read["c"]["mean"]) == ("1", "1", "1")
    with pytest.raises(ValueError, match="bucket_size"):
        StatisticsSubscriber(tmp_path / "other", bucket_size=0)
