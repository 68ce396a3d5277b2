"""Statistics of activations are files, equal for eager PyTorch and the engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from test_subscribers import NAMES, Net, unsubscribed  # noqa: F401

from onnxtrain.ortmodule import ORTModule
from onnxtrain.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber


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
