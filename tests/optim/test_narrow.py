"""Stochastic rounding: against its definition, and the errors that the documentation promises."""

from __future__ import annotations

import pytest
import torch

from onnxtrain.optim import SGD

NARROW = (torch.bfloat16, torch.float16)


def neighbours(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number of the dtype at most x and the smallest at least x; x is float64."""
    near = x.to(dtype)
    inf = torch.full_like(near, float("inf"))
    low = torch.where(near.double() <= x, near, torch.nextafter(near, -inf))
    high = torch.where(near.double() >= x, near, torch.nextafter(near, inf))
    return low.double(), high.double()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("value", [1.0009, 1.003, -3.017, 1e-3, 100.3, 1.0, 3.1e-7, 0.0])
def test_rounding_is_to_a_neighbour_and_right_on_average(dtype, value):
    torch.manual_seed(1)
    n = 1 << 18
    p = torch.nn.Parameter(torch.zeros(n, dtype=dtype))
    p.grad_dtype = torch.float32
    p.grad = torch.full((n,), -value)
    SGD([p], lr=1.0, stochastic_rounding=True).step()
    exact = p.grad[:1].neg().double()
    low, high = neighbours(exact, dtype)
    got = p.detach().double()
    assert bool(((got == low) | (got == high)).all())
    gap = (high - low).item()
    if gap:
        share = ((exact - low) / gap).item()
        up = (got == high).double().mean().item()
        assert abs(up - share) < 5 * (share * (1 - share) / n) ** 0.5 + 2**-16, "16 bits decide"
    else:
        assert bool((got == exact).all())


@pytest.mark.parametrize("dtype", NARROW)
def test_large_and_special_numbers(dtype):
    most = torch.finfo(dtype).max
    values = torch.tensor([most, -most, float("inf"), float("-inf"), float("nan"), 0.0, -0.0], dtype=torch.float32)
    p = torch.nn.Parameter(torch.zeros(7, dtype=dtype))
    p.grad_dtype = torch.float32
    p.grad = -values
    SGD([p], lr=1.0, stochastic_rounding=True).step()
    assert torch.equal(p[:4].detach().float(), values[:4]) and bool(p[4].isnan()) and bool((p[5:] == 0).all())


def test_small_steps_are_not_lost():
    """1e-4 is a fortieth of bfloat16's spacing at 1: to nearest nothing ever happens."""
    nearest, random = (torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16)) for _ in range(2))
    a, b = SGD([nearest], lr=1e-4), SGD([random], lr=1e-4, stochastic_rounding=True)
    for _ in range(400):
        nearest.grad = random.grad = torch.ones(10_000, dtype=torch.bfloat16)
        a.step()
        b.step()
    assert bool((nearest == 1).all())
    assert random.float().mean().item() == pytest.approx(0.96, abs=1e-3)


def test_streams_are_keyed_by_seed_step_and_parameter():
    def run(seed):
        torch.manual_seed(seed)
        params = [torch.nn.Parameter(torch.ones(500, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = SGD(params, lr=1e-3, stochastic_rounding=True)
        steps = []
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
                p.data.fill_(1.0)
            optimizer.step()
            steps += [p.detach().clone() for p in params]
        return steps

    first, again, other = run(0), run(0), run(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    for i, a in enumerate(first):
        assert not torch.equal(a, other[i])
        assert all(not torch.equal(a, b) for b in first[:i]), "two steps or parameters draw alike"


def test_strided_parameters_are_rounded_alike():
    torch.manual_seed(0)
    dense = torch.nn.Parameter(torch.ones(40, 50, dtype=torch.bfloat16))
    view = torch.nn.Parameter(torch.ones(40, 100, dtype=torch.bfloat16)[:, ::2])
    for p in (dense, view):
        p.grad = torch.full((40, 50), 0.3, dtype=torch.bfloat16)
        torch.manual_seed(0)
        SGD([p], lr=1e-2, stochastic_rounding=True).step()
    assert torch.equal(dense, view)
