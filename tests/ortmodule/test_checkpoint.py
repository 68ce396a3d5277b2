"""torch.utils.checkpoint inside a module: never kept without a word, and less memory than without it."""

import copy
import logging

import pytest
import torch
import torch.nn as nn
from torch.utils import checkpoint

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(torch.tanh(x))))


class Net(nn.Module):
    def __init__(self, checkpointed, reentrant=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointed else layer(x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_saves_memory_and_is_named(reentrant, monkeypatch, caplog):
    torch.manual_seed(0)
    plain = Net(False)
    net = Net(True, reentrant)
    net.load_state_dict(plain.state_dict())
    x, slabs, grads = torch.randn(2048, 256, requires_grad=True), [], []
    for module in (plain, net):
        with caplog.at_level(logging.WARNING, "onnxtrain"):
            model = ORTModule(copy.deepcopy(module))
            grads.append(torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()]))
        slabs.append(onnxtrain.stats(model)["slab_bytes"])
        assert onnxtrain.stats(model)["engine_steps"] == 1
        said = [r.getMessage() for r in caplog.records if "torch.utils.checkpoint around" in r.getMessage()]
        assert bool(said) == (module is net)
    assert "layer" in said[0].lower()
    assert slabs[1] < 0.8 * slabs[0]
    expected = torch.autograd.grad(plain(x).square().mean(), [x, *plain.parameters()])
    for got, again, want in zip(*grads, expected, strict=True):
        assert torch.equal(got, again)
        assert (again - want).abs().max() <= 1e-5 * want.abs().max()
