"""On which device a module runs: what a program is kept for, and tensors on several devices, by name."""

from __future__ import annotations

import struct
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from onnxtrain import _C, stats
from onnxtrain.ortmodule import ORTModule, _device
from onnxtrain.ortmodule._fallback import ORTModuleDeviceException
from onnxtrain.ortmodule._key import describe


def test_a_program_is_for_one_of_several_gpus():
    with FakeTensorMode():
        first, again, other = (torch.empty(2, 3, device=f"cuda:{index}") for index in (0, 0, 1))
        assert describe(first) == describe(again) != describe(other)
    one, same = _C.signature((torch.empty(2, 3),)), _C.signature((torch.ones(4, 1),))
    _, device, index, rank = struct.unpack("4i", one)
    assert one == same and (device, index, rank) == (0, -1, 2)  # the CPU has no number


def test_the_first_tensor_of_each_device_is_named():
    tensors = [types.SimpleNamespace(device=place) for place in ("cuda:0", "cuda:1", "cuda:0", "cuda:1")]
    assert _device.on_several(zip(("a", "b", "c", "d"), tensors)) == (
        "a is on cuda:0, b is on cuda:1: move them to one device")
    assert _device.on_several(zip(("a", "c"), tensors[::2])) == ""


def test_names_of_arguments():
    def forward(x, batch, *more, flag=True, **rest):
        pass

    x, ids, mask, last, named = (torch.empty(1) for _ in range(5))
    names = _device.names_of(forward, (x, {"ids": ids, "masks": [mask]}, last), {"other": named})
    assert names == {id(x): "x", id(ids): "batch['ids']", id(mask): "batch['masks'][0]", id(last): "more[0]",
                     id(named): "rest['other']"}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, side):
        return self.fc(x), side["scale"] * 2


def test_an_argument_on_another_device_than_the_weights_is_named(monkeypatch):
    x, far = torch.randn(2, 4), {"scale": torch.empty(3, device="meta")}
    model = ORTModule(Two())
    y, scaled = model(x, far)  # PyTorch runs the call
    assert torch.equal(y, model.module.fc(x)) and scaled.device.type == "meta"
    wanted = r"argument x is on cpu, argument side\['scale'\] is on meta: move them to one device"
    assert stats(model)["fallback_steps"] == 1
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    strict = ORTModule(Two())
    with pytest.raises(ORTModuleDeviceException, match=wanted):
        strict(x, far)
    near = {"scale": torch.ones(3)}
    assert torch.equal(strict(x, near)[1], torch.full((3,), 2.0))  # a call that is right runs in the engine
    with pytest.raises(ORTModuleDeviceException, match=wanted):
        strict(x, far)
