"""Functions of torch that draw, by operators of the engine, as for a module on a GPU: dtypes, shapes and distributions
of what eager draws; on the CPU the numbers of eager.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain._export import autograd_functions
from onnxtrain.ortmodule import ORTModule

ROWS, COLUMNS = 200, 300


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Exports as for a module that is not on the CPU."""
    monkeypatch.setattr(autograd_functions, "drawn_by_torch", dict)
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "")


class Drawing(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x):
        return self.function(x), x.sum() * self.weight


def drawn(function, x):
    """What two steps draw in the engine, with no part in PyTorch."""
    torch.manual_seed(0)
    module = Drawing(function)
    model = ORTModule(module)
    results = []
    for _ in range(2):
        y, total = model(x)
        total.backward()
        results.append(y)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 2 and not counts["fallback_steps"], counts["reasons"]
    assert all(len(program.sessions) == 1 for _, programs in model._all_programs() for program in programs)
    want = function(x)
    assert all(y.dtype == want.dtype and y.shape == want.shape for y in results)
    assert want.numel() < 10 or not torch.equal(*results)
    return results[0]


X = torch.linspace(-1, 1, ROWS * COLUMNS).view(ROWS, COLUMNS)
# name: function, mean, variance, least and largest value
NUMBERS = {
    "rand": (lambda x: torch.rand(x.shape), 0.5, 1 / 12, 0, 1),
    "rand of one column": (lambda x: torch.rand(x.shape[0], 1, dtype=torch.float64), 0.5, 1 / 12, 0, 1),
    "rand_like": (lambda x: torch.rand_like(x, dtype=torch.float16), 0.5, 1 / 12, 0, 1),
    "randn": (lambda x: torch.randn(x.shape), 0, 1, -9, 9),
    "randn_like": (torch.randn_like, 0, 1, -9, 9),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), 2, 9, -30, 30),
    "normal_ in float64": (lambda x: torch.empty_like(x, dtype=torch.float64).normal_(0.1, 1e-12), 0.1, 1e-24,
                           0.1 - 1e-11, 0.1 + 1e-11),
    "normal": (lambda x: torch.normal(2.0, 3.0, x.shape), 2, 9, -30, 30),
    "normal_ of a number": (lambda x: torch.empty(()).normal_(5, 0.1), 5, 1, 4, 6),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(1, 2), 1.5, 1 / 12, 1, 2 - 2**-23),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25, 0, 20),
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.2)), 0.2, 0.16, 0, 1),
    "bernoulli_ in bfloat16": (lambda x: torch.empty_like(x, dtype=torch.bfloat16).bernoulli_(0.001), 0.001, 0.000999, 0, 1),
    "bernoulli_ of bool": (lambda x: torch.empty(x.shape, dtype=torch.bool).bernoulli_(0.3), 0.3, 0.21, 0, 1),
    "randint": (lambda x: torch.randint(10, x.shape), 4.5, 8.25, 0, 9),
    "randint of a range": (lambda x: torch.randint(-3, 2, x.shape, dtype=torch.int32), -1, 2, -3, 1),
    "randint_like": (lambda x: torch.randint_like(x, 4, 6), 4.5, 0.25, 4, 5),
    "the last bit of randint": (lambda x: torch.randint(2**40, x.shape) % 2, 0.5, 0.25, 0, 1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_distributions(on_a_gpu, name):
    function, mean, variance, least, largest = NUMBERS[name]
    y = drawn(function, X).double()
    assert y.min() >= least and y.max() <= largest
    if y.numel() > 1:
        assert abs(y.mean() - mean) < 6 * math.sqrt(variance / y.numel())
        assert abs(y.var() / variance - 1) < 60 / math.sqrt(y.numel())
    if y.numel() == X.numel() and variance > 0.01:
        assert abs(torch.corrcoef(torch.stack((y.flatten()[1:], y.flatten()[:-1])))[0, 1]) < 6 / math.sqrt(y.numel())


def assert_frequency(hits, p):
    assert abs(hits.double().mean() - p) <= 5 * math.sqrt(p * (1 - p) / hits.numel()), (hits.double().mean(), p)


P = torch.tensor([1.0, 2.0, 0.0, 3.0])  # not divided by their sum


@pytest.mark.parametrize("count", [1, 2])
def test_multinomial_with_replacement(on_a_gpu, count):
    y = drawn(lambda x: torch.multinomial(P.expand(x.shape[0] * 100, 4), count, replacement=True), X)
    for k in range(4):
        assert_frequency(y[:, -1] == k, P[k].item() / 6)
    if count == 2:
        assert_frequency((y[:, 0] == 3) & (y[:, 1] == 3), 0.25)


def test_multinomial_without_replacement(on_a_gpu):
    """The second class is drawn among those that are left."""
    y = drawn(lambda x: torch.multinomial(P.expand(x.shape[0] * 100, 4), 2), X)
    assert (y[:, 0] != y[:, 1]).all() and (y != 2).all()
    for i in (0, 1, 3):
        for j in (0, 1, 3):
            if i != j:
                assert_frequency((y[:, 0] == i) & (y[:, 1] == j), P[i].item() / 6 * P[j].item() / (6 - P[i].item()))


def test_multinomial_of_one_row(on_a_gpu):
    assert sorted(drawn(lambda x: torch.multinomial(P[[0, 1, 3]], 3), X).tolist()) == [0, 1, 2]
    assert_frequency(drawn(lambda x: torch.multinomial(P, 20_000, True), X) == 3, 0.5)


@pytest.mark.parametrize("function", [lambda x: torch.multinomial(x.exp(), 3), torch.rand_like,
                                      lambda x: torch.multinomial(x[0].exp(), 3, True)])
def test_on_the_cpu_a_seed_draws_what_it_draws_in_pytorch(function):
    module = Drawing(function)
    model = ORTModule(module)
    model(X)
    results = []
    for one in (model, module):
        torch.manual_seed(5)
        results.append(one(X)[0])
    assert torch.equal(*results) and onnxtrain.stats(model)["fallback_steps"] == 0


@pytest.mark.parametrize("function", [
    lambda x: torch.randn_like(x), lambda x: torch.rand_like(x.transpose(0, 2)),
    lambda x: torch.randint_like(x.transpose(1, 2), 3, 1000), lambda x: torch.randn_like(x[:, 1:3].transpose(0, 1)),
    lambda x: torch.randn_like(x.transpose(0, 1), memory_format=torch.contiguous_format),
    lambda x: torch.bernoulli(x.sigmoid().transpose(0, 1)),
], ids=["argument", "transpose", "whole numbers", "slice", "contiguous", "bernoulli"])
def test_on_the_cpu_numbers_lie_in_the_order_of_memory(function):
    """torch fills memory, and a view's is not in the order of its dimensions."""
    model = ORTModule(Drawing(function))
    for dims in ((0, 1, 2), (1, 2, 0), (0, 2, 1), (0, 1, 2)):
        x = torch.rand(6, 7, 8).permute(dims)
        torch.manual_seed(3)
        got = model(x)[0]
        torch.manual_seed(3)
        assert torch.equal(got, function(x)), dims
    assert not onnxtrain.stats(model)["fallback_steps"]
