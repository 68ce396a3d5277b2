"""A step counts up the version of each parameter that it writes, as autograd expects."""

from __future__ import annotations

import pytest
import torch

from onnxtrain.optim import SGD, FusedAdam


def test_in_place_change_is_seen_by_autograd():
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    version = p._version
    SGD([p], lr=0.1).step()
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_versions_of_many_parameters_count_up_by_one_each():
    params = [torch.nn.Parameter(torch.ones(i % 5)) for i in range(333)]
    for i, p in enumerate(params):
        p.grad = None if i % 7 == 3 else torch.ones_like(p)
    optimizer = FusedAdam(params)
    for _step in range(3):
        before = [p._version for p in params]
        optimizer.step()
        assert [p._version - v for p, v in zip(params, before)] == [0 if i % 7 == 3 else 1 for i in range(333)]
