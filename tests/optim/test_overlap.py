"""Tensors of a step that share memory are found and refused, whenever they come to share it."""

from __future__ import annotations

import pytest
import torch

from onnxtrain.optim import SGD, FusedAdam


def test_shared_memory_is_refused():
    base = torch.ones(10)
    a, b = torch.nn.Parameter(base[:6]), torch.nn.Parameter(base[5:])
    for p in (a, b):
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="parameter number 1.*shares memory with the parameter number 0"):
        SGD([a, b], lr=1.0).step()
    c, d = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    c.grad, d.grad = d.detach(), torch.ones(4)
    with pytest.raises(ValueError, match="the gradient number 0.*shares memory with the parameter number 1"):
        SGD([c, d], lr=1.0).step()
    assert torch.equal(c, torch.ones(4)) and torch.equal(base, torch.ones(10))


def test_overlap_is_seen_whenever_it_arises():
    params = [torch.nn.Parameter(torch.ones(100)) for _ in range(20)]
    optimizer = SGD(params, lr=0.1)
    for step in range(6):
        for p in params:
            p.grad = torch.ones(100)
        if step == 4:
            params[7].grad = params[8].data
        if step == 5:
            params[3].data = params[4].data[:]
        if step < 4:
            optimizer.step()
        else:
            with pytest.raises(ValueError, match="shares memory"):
                optimizer.step()


def test_overlap_is_seen_after_steps_in_which_nothing_moved():
    """Such steps are not looked at again; what changes any operand's place must end that."""
    params = [torch.nn.Parameter(torch.ones(100)) for _ in range(20)]
    for p in params:
        p.grad = torch.ones(100)
    optimizer = FusedAdam(params, lr=0.1)

    def refused(change, mend):
        for _ in range(3):
            optimizer.step()
        change()
        before = [p.detach().clone() for p in params]
        for _ in range(2):
            with pytest.raises(ValueError, match="shares memory"):
                optimizer.step()
        assert all(map(torch.equal, params, before))
        mend()
        optimizer.step()
        assert not any(map(torch.equal, params, before))

    grad, data = params[7].grad, params[3].data
    refused(lambda: setattr(params[7], "grad", params[8].data), lambda: setattr(params[7], "grad", grad))
    refused(lambda: setattr(params[3], "data", params[4].data), lambda: setattr(params[3], "data", data))
    moment = optimizer.state[params[5]]["exp_avg"]
    refused(lambda: optimizer.state[params[5]].update(exp_avg=optimizer.state[params[6]]["exp_avg_sq"]),
            lambda: optimizer.state[params[5]].update(exp_avg=moment))
    refused(lambda: setattr(params[9], "grad", optimizer.state[params[2]]["exp_avg"]),
            lambda: setattr(params[9], "grad", torch.ones(100)))


def test_interleaved_columns_and_shared_gradients_are_fine():
    base, grad = torch.ones(8, 2), torch.ones(8)
    a, b = torch.nn.Parameter(base[:, 0]), torch.nn.Parameter(base[:, 1])
    a.grad = b.grad = grad
    SGD([a, b], lr=0.5).step()
    assert torch.equal(base, torch.full((8, 2), 0.5))
    c = torch.nn.Parameter(torch.ones(4))
    c.grad = c.detach()
    SGD([c], lr=0.25).step()
    assert torch.equal(c, torch.full((4,), 0.75))
