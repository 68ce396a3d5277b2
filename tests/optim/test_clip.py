"""clip_grad_norm_ and what it is made of, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from problem import Problem, make_params

from onnxtrain.optim import clip_grad_norm_

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.0, 0.1, 3.0, 1e9])
@pytest.mark.parametrize("norm_type", [2, 1.0, math.inf])
def test_as_torch(dtype, limit, norm_type):
    ours, theirs = make_params(dtype=dtype), make_params(dtype=dtype)
    Problem(ours).set_grads()
    Problem(theirs).set_grads()
    ours[1].grad = theirs[1].grad = None
    before = [None if p.grad is None else p.grad.clone() for p in ours]
    a, b = clip_grad_norm_(ours, limit, norm_type), torch.nn.utils.clip_grad_norm_(theirs, limit, norm_type)
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-6 if dtype.itemsize > 2 else 1e-2, atol=0)
    for p, q, g in zip(ours, theirs, before):
        if g is not None:
            tolerance = {} if dtype.itemsize > 2 else {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-7}
            torch.testing.assert_close(p.grad, q.grad, **tolerance)
            assert limit < 1e9 or torch.equal(p.grad, g)


def test_strided_gradients_and_one_tensor():
    p = torch.nn.Parameter(torch.zeros(4, 6))
    memory = torch.arange(48.0).view(6, 8)
    p.grad = memory[:, ::2].t()
    expected = p.grad.clone()
    norm = clip_grad_norm_(p, 1.0)
    torch.testing.assert_close(norm, expected.norm())
    torch.testing.assert_close(p.grad, expected / expected.norm())
    assert torch.equal(memory[:, 1::2], torch.arange(48.0).view(6, 8)[:, 1::2]), "wrote between the gradient's elements"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_norm_that_is_not_finite(value):
    p, q = torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(5))
    p.grad = torch.tensor([1.0, value, 2.0, 3.0, 4.0])
    q.grad = p.grad.clone()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert torch.equal(p.grad[2:], q.grad[2:])
    clip_grad_norm_([p], 1.0)
    torch.nn.utils.clip_grad_norm_([q], 1.0)
    torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_sparse_goes_to_torch():
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises((RuntimeError, NotImplementedError)) as here:
        clip_grad_norm_(table.weight, 1.0)
    with pytest.raises(type(here.value)):
        torch.nn.utils.clip_grad_norm_(table.weight, 1.0)
