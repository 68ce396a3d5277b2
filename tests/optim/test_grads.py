"""Sums of squares and scaled gradients are what PyTorch computes from the same tensors."""

from __future__ import annotations

import math

import pytest
import torch
from test_clip import DTYPES
from torch._subclasses import FakeTensorMode

from onnxtrain import _C


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
