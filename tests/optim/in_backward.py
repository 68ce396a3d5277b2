"""What the tests of step_in_backward() share: optimizers, a module, and two copies of it of which one is joined."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from onnxtrain.optim import SGD, Adagrad, FusedAdam, Lamb, Lion, step_in_backward
from onnxtrain.ortmodule import ORTModule

OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, maximize=True),
    "adam": lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1),
    "adam_int8": lambda p: FusedAdam(p, lr=1e-2, state_dtype="int8"),
    "lamb": lambda p: Lamb(p, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}
WIDE = 300  # a weight of several of the engine's chunks


class Net(nn.Module):
    """An embedding that is also the last product's weight, a matrix used twice, odd sizes, numbers without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 24)
        self.twice, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, WIDE), nn.Linear(WIDE, 24, bias=False)
        self.scale, self.frozen = nn.Parameter(torch.tensor(1.5)), nn.Linear(24, 24)
        self.unused = nn.Linear(3, 3)
        self.wide = nn.Linear(WIDE, WIDE)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.words(tokens)))) + self.frozen(self.words(tokens))
        x = x + self.down(F.gelu(self.wide(F.gelu(self.up(self.norm(x))))))
        return self.scale * x @ self.words.weight.T


class Parts(nn.Module):
    """Layers and parameters by their names, and the forward that uses them."""

    def __init__(self, use, **parts) -> None:
        super().__init__()
        self.use = use
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.use(self, x)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, -2).float(), tokens.flatten())


def same(a: nn.Module, b: nn.Module, x: torch.optim.Optimizer, y: torch.optim.Optimizer) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert p._version == q._version, name
    for group, other in zip(x.param_groups, y.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            assert x.state.get(p, {}).keys() == y.state.get(q, {}).keys()
            for key, value in x.state.get(p, {}).items():
                assert torch.equal(value, y.state[q][key]), key


def pair(make, net=Net, join=True):
    """(model, optimizer) with the step in backward, and the same without."""
    torch.manual_seed(0)
    module = net()
    a, b = ORTModule(copy.deepcopy(module)), ORTModule(copy.deepcopy(module))
    x, y = make(a.parameters()), make(b.parameters())
    if join:
        step_in_backward(x, a)
    return a, x, b, y
