"""Models and steps of the tests of losses outside the module."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._unread import STEPS

WORDS, BATCH, LENGTH = 4096, 2, 40


class Model(nn.Module):
    """Scores of the words of each position; `more` returns hidden states beside them."""

    def __init__(self, dropout=0.0, norm=False, more=False):
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, 16), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(LENGTH) if norm else nn.Identity()
        self.middle, self.head, self.more = nn.Linear(16, 16), nn.Linear(16, WORDS), more

    def forward(self, x):
        hidden = torch.tanh(self.middle(self.norm(self.dropout(self.words(x)))))
        return (self.head(hidden), hidden) if self.more else self.head(hidden)


class Padded(nn.Module):
    """Attention over the tokens that are not padding."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.head(self.layer(self.words(x), src_key_padding_mask=x == 0))


def batch(seed, size=BATCH, length=LENGTH, ignored=0.8):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(1, WORDS, (2, size, length), generator=generator)
    return x, y.where(torch.rand(y.shape, generator=generator) >= ignored, -100)


def padded_batch(seed):
    x, y = batch(seed)
    lengths = torch.randint(LENGTH // 4, LENGTH // 2, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    padding = torch.arange(LENGTH) >= lengths
    return x.masked_fill(padding, 0), y.masked_fill(padding, -100)


def masked(scores, y):
    return F.cross_entropy(scores.view(-1, WORDS), y.view(-1))


def pair(module=Model, dtype=torch.float32, **kwargs):
    """A module and, wrapped, its copy."""
    torch.manual_seed(5)
    eager = module(**kwargs).to(dtype)
    return eager, ORTModule(copy.deepcopy(eager))


def step(model, seed, loss=masked, batch=batch):
    x, y = batch(seed)
    value = loss(model(x), y)
    value.backward()
    return value.detach()


def settled(model, loss=masked, batch=batch):
    """The model after the steps that tell where scores go, and one more, which tries it."""
    for seed in range(STEPS + 1):
        step(model, seed, loss, batch)
    model.zero_grad()
    assert joined(model) == 1
    return model


def joined(model):
    return onnxtrain.stats(model)["outside_losses"]


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def same_gradients(ours, eager, tolerance=1e-5):
    for got, want in zip(gradients(ours), gradients(eager), strict=True):
        assert (got - want).abs().max() <= tolerance * want.abs().max() + 1e-2 * tolerance ** 2
