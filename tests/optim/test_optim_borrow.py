"""A step refuses tensors that it cannot read, by name and before it touches any."""

from __future__ import annotations

import pytest
import torch
from test_step import ALL
from torch._subclasses import FakeTensorMode

from onnxtrain.optim import SGD


@pytest.mark.parametrize("kind", ALL)
def test_sparse_gradients_are_refused_by_name(kind):
    dense, table = torch.nn.Parameter(torch.ones(3)), torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    dense.grad = torch.ones(3)
    optimizer = ALL[kind]([dense, table.weight])
    with pytest.raises(RuntimeError,
                       match=f"{ALL[kind].__name__} does not support sparse gradients.*parameter 1 of group 0"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3)), "nothing was updated"
    assert kind == "adagrad" or dense not in optimizer.state, "and no state was made"
    table.weight.grad = table.weight.grad.to_dense()
    optimizer.step()
    assert (dense < 1).all() and (kind in ("sgd", "lion") or optimizer.state[dense]["step"].item() == 1)


def bad_complex():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    return p


def bad_meta():
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones_like(p)
    return p


def bad_fake():
    """As DTensors: it says that it is on the CPU, and has no memory there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
    return p


@pytest.mark.parametrize("bad", [bad_complex, bad_meta, bad_fake])
def test_other_tensors_are_refused(bad):
    good = torch.nn.Parameter(torch.ones(3))
    good.grad = torch.ones(3)
    with pytest.raises(TypeError, match="SGD: parameter 1 of group 0.* (is complex64|is on meta|no memory of its own)"):
        SGD([good, bad()], lr=1.0).step()
    assert torch.equal(good, torch.ones(3))
