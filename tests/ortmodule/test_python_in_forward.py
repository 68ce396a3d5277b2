"""Python in forward that Dynamo takes for more than it is: equal to eager, without a cut, by one export for all sizes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule

EXPORTS = 1 if torch.__version__ >= (2, 11) else 2  # an older torch has the formulas of some sizes as constants first
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(4, 4), nn.Linear(4, 2), use

    def forward(self, *args):
        return self.use(self, *args)


def trained(use, calls):
    """stats() of a wrapped module after a step with each of these arguments, whose results and gradients are eager's."""
    torch.manual_seed(0)
    eager = Net(use)
    model = ORTModule(copy.deepcopy(eager))
    for args in calls:
        losses = []
        for module in (eager, model):
            module.zero_grad()
            losses.append(module(*args))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        for (name, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=name)
    return onnxtrain.stats(model)


def in_the_engine(counts, steps):
    assert (counts["graph_breaks"], counts["reasons"]) == ([], []) and counts["exports"] <= EXPORTS
    assert (counts["engine_steps"], counts["fallback_steps"]) == (steps, 0)


def compared(m, x):
    y = x.new_ones(x.shape[0], 3, 4)
    h = m.first(x)
    h = h * 2 if np.prod(x.shape) < np.prod(y.shape) else h
    return (h * np.max(x.shape[1:])).sum() / int(np.prod(x.shape))


def flattened(m, x):
    return m.first(x.view(-1, np.prod(x.shape[1:]))).reshape(np.prod(x.shape)).mean() * np.min(x.shape)


def scaled(m, x):
    """A loss without dims stays one of float32, as NumPy's numbers are Python's to PyTorch."""
    return m.first(x / np.sqrt(x.shape[-1])).sum() / np.sqrt(x.shape[0]) * np.log(2.0) + np.exp(1)


@pytest.mark.parametrize("use", [compared, flattened, scaled])
def test_numpy_of_sizes_and_numbers(use):
    in_the_engine(trained(use, [(torch.randn(rows, 4),) for rows in (2, 3, 5, 4)]), 4)
