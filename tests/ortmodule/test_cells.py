"""Recurrent cells that a Python loop calls at each step of a sequence."""

import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Loop(nn.Module):
    """Two cells, one above the other, over a sequence."""

    def __init__(self, kind, **options):
        super().__init__()
        self.cells = nn.ModuleList(kind(width, 6, **options) for width in (3, 6))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        states, results = [None, None], []
        for step in range(x.size(1)):
            value = x[:, step]
            for i, cell in enumerate(self.cells):
                states[i] = cell(value, states[i])
                value = states[i][0] if isinstance(states[i], tuple) else states[i]
            results.append(self.out(value))
        return torch.cat(results, 1), states[-1]


@pytest.mark.parametrize("kind, options", [
    (nn.LSTMCell, {}), (nn.LSTMCell, {"bias": False}), (nn.GRUCell, {}), (nn.GRUCell, {"bias": False}), (nn.RNNCell, {}),
    (nn.RNNCell, {"nonlinearity": "relu"})])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_loop(kind, options, autocast):
    torch.manual_seed(0)
    eager = Loop(kind, **options)
    model = ORTModule(copy.deepcopy(eager))
    for _ in range(2):
        x, found = torch.randn(4, 5, 3), []
        for module in (model, eager):
            module.zero_grad()
            given = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out, state = module(given)
            state = state if isinstance(state, tuple) else (state,)
            (out.float().square().sum() + sum(each.float().sum() for each in state)).backward()
            found.append([out, *state, given.grad, *(p.grad for p in module.parameters())])
        for got, want in zip(*found, strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, **({"rtol": 0.05, "atol": 0.05} if autocast else {}))
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["graph_breaks"]) == (2, 0, []), counts["reasons"]


def test_one_sample():
    cell = nn.LSTMCell(3, 4)
    model, x = ORTModule(copy.deepcopy(cell)), torch.randn(3)
    for got, want in zip(model(x), cell(x), strict=True):
        torch.testing.assert_close(got, want)
    assert onnxtrain.stats(model)["engine_steps"] == 1


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_batches_and_lengths(kind):
    """The length of a loop that is unrolled is fixed in its export, the batch is not."""
    torch.manual_seed(0)
    eager = Loop(kind)
    model = ORTModule(copy.deepcopy(eager))
    for rows, steps, exports in ((4, 20, 1), (5, 20, 1), (4, 18, 2), (6, 18, 2), (3, 20, 2)):
        x, found = torch.randn(rows, steps, 3), []
        for module in (model, eager):
            module.zero_grad()
            out, _ = module(x)
            out.square().sum().backward()
            found.append([out, *(p.grad for p in module.parameters())])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        counts = onnxtrain.stats(model)
        assert (counts["exports"], counts["fallback_steps"]) == (exports, 0), counts["reasons"]


def test_many_columns_of_an_open_size():
    """A size that Dynamo has left open stays so, whatever a graph takes of it."""
    eager = nn.Linear(4, 4)

    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = copy.deepcopy(eager)

        def forward(self, x):
            return sum(self.fc(x[:, column]) for column in range(18))

    model = ORTModule(Columns())
    for rows, columns in ((2, 20), (3, 22), (2, 18)):
        x = torch.randn(rows, columns, 4)
        torch.testing.assert_close(model(x), eager(x[:, :18]).sum(1))
    counts = onnxtrain.stats(model)
    assert (counts["exports"], counts["engine_steps"]) == (1, 3)
