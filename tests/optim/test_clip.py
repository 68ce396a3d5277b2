"""clip_grad_norm_ and what it is made of, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from problem import Problem, make_params
from torch._subclasses import FakeTensorMode

from onnxtrain import _C
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


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4099, 200_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares(size, dtype):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    (total,) = _C.sums_of_squares([x])
    assert total == pytest.approx(x.double().square().sum().item(), rel=1e-6 if dtype != torch.float64 else 1e-12)
    for bad in (math.inf, -math.inf, math.nan):
        for place in {0, size // 2, size - 1} if size else ():
            y = x.clone()
            y[place] = bad
            assert not math.isfinite(_C.sums_of_squares([y])[0]) and _C.scale_tensors([y], [y], 1.0, 0.0) is False


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_scale_tensors(source, target, keep):
    for size in (1, 31, 5000):
        x = torch.randn(size, 2).to(source)
        y = torch.randn(size, 2).to(target) if keep else torch.full((size, 2), math.nan, dtype=target)
        expected = x.double() * 0.25 + (y.double() * keep if keep else 0)
        assert _C.scale_tensors([x, x[:1]], [y, torch.zeros(1, 2)], 0.25, keep) is True
        torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(target).eps, atol=1e-6)


def test_what_is_refused():
    with pytest.raises(TypeError, match="tensor 1 is int64"):
        _C.sums_of_squares([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="source 0 and its target differ in shape"):
        _C.scale_tensors([torch.ones(2)], [torch.ones(3)], 1.0, 0.0)
    with pytest.raises(ValueError, match="there are 1 sources, but 0 targets"):
        _C.scale_tensors([torch.ones(2)], [], 1.0, 0.0)
    x = torch.ones(4)
    with pytest.raises(ValueError, match="shares memory"):
        _C.scale_tensors([x[:3]], [x[1:]], 1.0, 0.0)
    with pytest.raises(TypeError):
        _C.sums_of_squares(3)
    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(TypeError, match="tensor 0: the tensor has no memory of its own"):
        _C.sums_of_squares([fake])
