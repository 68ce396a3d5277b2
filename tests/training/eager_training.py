"""Models, and what eager PyTorch computes with the update rules of docs/trainer.md, written down once more."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from onnxtrain.training import ORTTrainer, ORTTrainerOptions

CPU = {"device": {"id": "cpu"}}


class Net(nn.Module):
    """Scores of four classes."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.dropout = dropout

    def forward(self, x):
        hidden = F.dropout(torch.tanh(self.norm(self.first(x))), self.dropout, self.training)
        return self.last(hidden)


def cross_entropy(scores, label):
    return F.cross_entropy(scores, label)


DESCRIPTION = {"inputs": [("x", ["batch", 8]), ("label", ["batch"])],
               "outputs": [("loss", [], True), ("scores", ["batch", 4])]}


def net(seed=0, **arguments):
    torch.manual_seed(seed)
    return Net(**arguments)


def batches(count, seed=1, size=6):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator))
            for _ in range(count)]


def options(**more):
    return ORTTrainerOptions({**CPU, **more})


def trainer_of(module, config, **more):
    return ORTTrainer(module, DESCRIPTION, config, loss_fn=cross_entropy, options=options(**more))


class Eager:
    """The same training by PyTorch, with an optimizer's configuration.

    accumulation, lr: as the trainer has them; lr is a function of the number of updates.
    """

    def __init__(self, module, config, loss_fn=cross_entropy, accumulation=1, lr=None, clip=True):
        self.module, self.config, self.loss_fn = copy.deepcopy(module), config, loss_fn
        self.accumulation, self.lr, self.clip = accumulation, lr or (lambda k: config.lr), clip
        self.state, self.calls, self.updates = {}, 0, 0

    def step(self, *inputs):
        loss = self.loss_fn(self.module(*inputs[:-1]), inputs[-1])
        loss.backward()
        self.calls += 1
        if self.calls % self.accumulation == 0:
            self.update()
        return loss.detach()

    @torch.no_grad()
    def update(self):
        named = {n: p for n, p in self.module.named_parameters() if p.grad is not None}
        grads = {n: p.grad / self.accumulation for n, p in named.items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        lr, self.updates = self.lr(self.updates), self.updates + 1
        for name, p in named.items():
            h = self.config.of(name)
            limit = h.get("max_norm_clip", math.inf) if self.clip else math.inf
            g = grads[name] * (limit / norm) if norm > limit else grads[name]
            if self.config.name == "SGDOptimizer":
                p -= lr * g
            else:
                self.adaptive(name, p, g, h, lr)
            p.grad = None

    def adaptive(self, name, p, g, h, lr):
        s = self.state.setdefault(name, {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0})
        s["t"] += 1
        s["m"] = h["alpha"] * s["m"] + (1 - h["alpha"]) * g
        s["v"] = h["beta"] * s["v"] + (1 - h["beta"]) * g * g
        c1, c2 = (1 - h["alpha"] ** s["t"], 1 - h["beta"] ** s["t"]) if h["do_bias_correction"] else (1.0, 1.0)
        direction = s["m"] / c1 / ((s["v"] / c2).sqrt() + h["epsilon"])
        if self.config.name == "LambOptimizer":
            u = h["lambda"] * p + direction
            pp, uu = p.norm(), u.norm()
            ratio = min(max(float(pp / uu), h["ratio_min"]), h["ratio_max"]) if pp > 0 and uu > 0 else 1.0
            p -= lr * ratio * u
        elif h["weight_decay_mode"] == 0:
            p -= lr * (direction + h["lambda"] * p)
        else:
            p -= lr * math.sqrt(c2) / c1 * s["m"] / (s["v"].sqrt() + h["epsilon"])
            p -= lr * h["lambda"] * p
