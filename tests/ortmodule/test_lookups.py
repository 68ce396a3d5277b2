"""Embeddings whose gradient torch computes: sparse ones train with SparseAdam, the rest of the module in the engine."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import both, in_engine

import onnxtrain
from onnxtrain.ortmodule import DebugOptions, ORTModule

ROWS = torch.tensor([[0, 1, 2], [2, 2, 5]])


class Tower(nn.Module):
    def __init__(self, lookup):
        super().__init__()
        self.lookup, self.fc = lookup, nn.Linear(4, 2)

    def forward(self, rows, *more):
        return self.fc(self.lookup(rows, *more).relu())


LOOKUPS = {
    "sparse": (lambda: nn.Embedding(7, 4, sparse=True), (ROWS,)),
    "sparse with padding": (lambda: nn.Embedding(7, 4, sparse=True, padding_idx=2), (ROWS,)),
    "by frequency": (lambda: nn.Embedding(7, 4, scale_grad_by_freq=True, padding_idx=-1), (ROWS,)),
    "sparse bag": (lambda: nn.EmbeddingBag(7, 4, sparse=True), (ROWS,)),
    "sparse bag with offsets": (lambda: nn.EmbeddingBag(7, 4, sparse=True, mode="sum"),
                                (ROWS.view(-1), torch.tensor([0, 1, 4]))),
    "bag by frequency": (lambda: nn.EmbeddingBag(7, 4, scale_grad_by_freq=True, mode="sum"), (ROWS,)),
    "sparse bag with weights": (lambda: nn.EmbeddingBag(7, 4, sparse=True, mode="sum"),
                                (ROWS, None, torch.rand(2, 3, requires_grad=True))),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_gradients_are_torchs(name):
    made, args = LOOKUPS[name]
    torch.manual_seed(0)
    eager = Tower(made())
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(verify=True))
    for _ in range(2):
        for model in (eager, ours):
            model.zero_grad()
            given = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
                     for a in args]
            model(*given).square().sum().backward()
            model.given = given[-1].grad if isinstance(given[-1], torch.Tensor) else None
        for p, q in zip(eager.parameters(), ours.parameters()):
            assert p.grad.layout == q.grad.layout
            torch.testing.assert_close(q.grad.to_dense(), p.grad.to_dense(), rtol=1e-5, atol=1e-5)
        if eager.given is not None:
            torch.testing.assert_close(ours.given, eager.given)
    in_engine(ours, 2)


def test_sparse_adam_trains():
    def use(model):
        model.lookup.weight.grad = None
        sparse = torch.optim.SparseAdam([model.lookup.weight], lr=0.1)
        dense = torch.optim.SGD(model.fc.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            for optimizer in (sparse, dense):
                optimizer.zero_grad()
            losses.append(model((ROWS + step) % 7).square().mean())
            losses[-1].backward()
            sparse.step()
            dense.step()
        untouched = model.lookup.weight[6].clone()
        model.zero_grad()
        return losses, untouched

    in_engine(both(lambda: Tower(nn.Embedding(7, 4, sparse=True)), use), 4)


def test_frozen_and_without_gradient():
    def use(model):
        model.lookup.weight.requires_grad_(False)
        model(ROWS).sum().backward()
        with torch.no_grad():
            return model(ROWS), model.lookup.weight.grad

    in_engine(both(lambda: Tower(nn.Embedding(7, 4, sparse=True)), use), 2)


def test_a_weight_that_forward_would_change_runs_in_pytorch():
    model = ORTModule(Tower(nn.Embedding(7, 4, max_norm=0.5)))
    model(ROWS).sum().backward()
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] == 1 and "max_norm" in counts["reasons"][0]


def test_functional_form_of_torch_itself():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 4))

        def forward(self, rows):
            return F.embedding(rows, self.weight, sparse=True).sum() + torch.embedding(self.weight, rows).sum()

    model = ORTModule(Direct())
    model(ROWS).backward()
    in_engine(model)
    counts = torch.bincount(ROWS.view(-1), minlength=7)
    assert torch.equal(model.weight.grad.to_dense(), 2 * counts[:, None].expand(7, 4).float())
