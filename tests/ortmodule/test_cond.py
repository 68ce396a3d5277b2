"""torch.cond inside a module: exported with the branches' weights, the branch chosen anew at each step; and map()."""

import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import X, both, in_engine, module, step
from torch._higher_order_ops.map import map as map_rows

import onnxtrain

TWO = {"two": lambda: nn.Linear(4, 4)}
UP, DOWN = X.detach() + 3, X.detach() - 3


def scaled(self, x):
    return torch.cond(x.sum() > 0, lambda x: self.fc(x) * self.scale, lambda x: F.gelu(self.two(x)), (x,))


def test_branches_with_weights_and_an_attribute():
    def use(model):
        model.scale = 2.0
        results = [step(UP)(model), step(DOWN)(model), step(X)(model)]
        model.scale = 3.0
        return [*results, step(UP)(model), step(DOWN)(model)]

    counts = in_engine(both(module(scaled, **TWO), use), 5)
    assert counts["exports"] == 2  # the attribute counts as read


def nested(self, x):
    inner = lambda x: torch.cond(x.mean() > 2, lambda x: self.fc(x), lambda x: self.two(x) * 2, (x,))  # noqa: E731
    return torch.cond(x.sum() > 0, inner, lambda x: self.two(x).tanh(), (self.fc(x),))


def attention(self, x):
    return torch.cond(x.sum() > 0, lambda x: F.scaled_dot_product_attention(0.1 * self.fc(x)[None], x[None],
                                                                            x[None])[0],
                      lambda x: self.two(x), (x,))


# Scores of a hundred: eager's own gradient is off by 1e-4 then.
@pytest.mark.parametrize("forward, tolerance", [
    (nested, 1e-4), (attention, 1e-3),
], ids=["nested", "attention"])
def test_nested_and_with_functions_that_the_export_rewrites(forward, tolerance):
    model = both(module(forward, **TWO), lambda m: [step(x)(m) for x in (UP, DOWN, UP * 3, UP)], tolerance)
    in_engine(model, 4)


def bare(self, x):
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: self.two(x), (self.fc(x),)), self.fc(x).sum()


@pytest.mark.parametrize("x", [UP, DOWN], ids=["up", "down"])
def test_the_branch_that_is_not_taken_gives_zeros(x):
    """Optimizers step where a gradient is zero, and not where there is none."""
    in_engine(both(module(scaled, **TWO, scale=lambda: 2.0), step(x)))
    in_engine(both(module(bare, **TWO), step(x)))

    def use(model):
        model(x)[1].backward()
        return [p.grad is None for p in model.parameters()]

    in_engine(both(module(bare, **TWO), use))
    constant = lambda self, x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: self.two(x), (x,))  # noqa: E731
    in_engine(both(module(constant, **TWO), step(x)))


def test_dynamo_does_not_keep_what_an_export_has_patched():
    """It reads the branches while torch.is_grad_enabled is another function, and is asked for that one later."""
    script = """
import torch
from onnxtrain.ortmodule import ORTModule

class Choosing(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

ORTModule(Choosing())(torch.ones(3, 4))
torch.compile(lambda x: x + 1 if torch.is_grad_enabled() else x, backend="eager", fullgraph=True)(torch.ones(2))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def still(x):
    with torch.no_grad():
        scale = x.square().mean(0)
    return x * scale


@pytest.mark.parametrize("forward", [
    lambda self, x: torch.cond(x.sum() > 0, still, lambda x: self.two(x), (self.fc(x),)),
    lambda self, x: torch.autocast("cpu", torch.bfloat16)(
        lambda h: torch.cond(h.sum() > 0, lambda h: self.two(h), lambda h: self.fc(h), (h,)))(self.fc(x)).float(),
    lambda self, x: map_rows(lambda row: self.two(row) + still(row), self.fc(x)),
], ids=["no_grad within", "autocast around", "in a map"])
def test_modes_that_an_export_would_lose_are_pytorchs(forward):
    model = both(module(forward, **TWO), lambda m: [step(x)(m) for x in (UP, DOWN)])
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 0 and counts["fallback_steps"] == 2
    assert "a torch.cond, while_loop or map is under autocast, or changes a mode within" in counts["reasons"][0]


def two_results(self, x):
    h = self.fc(x)
    rows, sums = map_rows(lambda row, mean: (row * 2 + mean, self.two(row).tanh().sum()), h, h.mean(0))
    return rows * sums[:, None]


def of_pairs(self, x):
    numbers = torch.arange(x.shape[0])
    return map_rows(lambda pair: map_rows(lambda entry: entry * 2, self.two(pair[0])) * pair[1], (self.fc(x), numbers))


@pytest.mark.parametrize("forward", [lambda self, x: map_rows(lambda row: self.two(row).relu(), self.fc(x)), two_results,
                                     of_pairs], ids=["rows", "two results", "nested"])
def test_map(forward):
    """It is a scan that carries nothing, for any number of rows."""
    counts = in_engine(both(module(forward, **TWO), lambda m: [step(x)(m) for x in (X, X[:2], UP)]), 3)
    assert counts["exports"] == 1 and counts["graph_breaks"] == []
