"""8-bit state packs and unpacks by its definition, and training with it goes as far."""

from __future__ import annotations

import pytest
import torch
from problem import Problem, make_params

from onnxtrain.optim import SGD, Adagrad, AdamWMode, FusedAdam, Lamb, Lion
from onnxtrain.optim._quant import pack, unpack


def test_levels_are_nearest_and_errors_are_as_documented():
    x = torch.randn(5000, dtype=torch.float32, generator=torch.Generator().manual_seed(0)) ** 3
    q = torch.empty(5000, dtype=torch.int8)
    scale = pack(x, q)
    s = scale.repeat_interleave(256)[:5000]
    error = (unpack(q, scale) - x).abs()
    assert bool((error <= torch.sqrt(x.abs() * s) / 127 + s * (0.5 / 127) ** 2 + 1e-6 * s).all())
    v = x.square()
    u = torch.empty(5000, dtype=torch.uint8)
    scale = pack(v, u)
    s, back = scale.repeat_interleave(256)[:5000], unpack(u, scale)
    assert bool((back[v > 0] > 0).all())
    relative = ((back - v).abs() / v)
    assert relative[v >= 0.9 * s].max() <= 0.0083 and relative[v >= 1e-4 * s].max() <= 0.082


def test_zero_blocks_and_special_values():
    for dtype in (torch.int8, torch.uint8):
        x = torch.zeros(600)
        x[300] = 1e-38
        q = torch.empty(600, dtype=dtype)
        scale = pack(x, q)
        back = unpack(q, scale)
        assert bool((back[:256] == 0).all()) and bool(back.isfinite().all())


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 70_000])
def test_the_core_packs_as_the_definition(size):
    """One step of SGD with momentum from nothing stores the gradient itself; one of Adagrad its square."""
    g = torch.randn(size, generator=torch.Generator().manual_seed(size))
    p, r = torch.nn.Parameter(torch.zeros(size)), torch.nn.Parameter(torch.zeros(size))
    p.grad, r.grad = g.clone(), g.clone()
    a, b = SGD([p], lr=1.0, momentum=0.9, state_dtype="int8"), Adagrad([r], lr=1.0, state_dtype="int8")
    a.step()
    b.step()
    q, u = torch.empty(size, dtype=torch.int8), torch.empty(size, dtype=torch.uint8)
    for state, name, value, levels in ((a.state[p], "momentum_buffer", g, q), (b.state[r], "sum", g * g, u)):
        scale = pack(value, levels)
        torch.testing.assert_close(state[f"{name}_scale"], scale, rtol=1e-6, atol=0)
        assert (state[name].int() - levels.int()).abs().max() <= 1 and (state[name] != levels).double().mean() < 0.001
    p.grad = torch.zeros(size)
    a.step()
    torch.testing.assert_close(p, -g - 0.9 * unpack(q, scale=pack(g, q)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [
    lambda p, s: FusedAdam(p, lr=0.01, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH, state_dtype=s),
    lambda p, s: FusedAdam(p, lr=0.01, amsgrad=True, state_dtype=s),
    lambda p, s: SGD(p, lr=0.02, momentum=0.9, state_dtype=s),
    lambda p, s: Adagrad(p, lr=0.1, state_dtype=s), lambda p, s: Lamb(p, lr=0.01, weight_decay=0.01, state_dtype=s),
    lambda p, s: Lion(p, lr=0.003, state_dtype=s)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_as_far(make, dtype):
    """The loss after 200 steps is near that with float32 state."""
    losses = []
    for state_dtype in ("int8", torch.float32):
        params = make_params(dtype=dtype)
        problem, optimizer = Problem(params), make(params, state_dtype)
        for _ in range(200):
            problem.set_grads()
            optimizer.step()
        losses.append(sum((c * (p.detach().double() - t).square()).sum().item()
                          for p, t, c in zip(params, problem.targets, problem.curvature)))
    start = sum((c * (p.detach().double() - t).square()).sum().item()
                for p, t, c in zip(make_params(), problem.targets, problem.curvature))
    assert losses[0] < losses[1] + 0.03 * start, (losses, start)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_it_takes_a_quarter_of_the_memory_and_follows_strides(memory_format):
    p = torch.nn.Parameter(torch.randn(8, 16, 12, 10).to(memory_format=memory_format))
    p.grad = torch.randn(8, 16, 12, 10)
    optimizer = FusedAdam([p], state_dtype="int8")
    optimizer.step()
    state = optimizer.state[p]
    held = sum(t.numel() * t.element_size() for k, t in state.items() if k != "step")
    assert held <= 2 * p.numel() * (1 + 4 / 256) + 16 and state["exp_avg"].stride() == p.stride()
    value = optimizer.state_dict()["state"][0]["exp_avg"]
    s = state["exp_avg_scale"].max().item()
    assert value.stride() == p.stride() and (value - 0.1 * p.grad).abs().max().item() < 0.01 * s


def test_doubles_keep_double_state():
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p], state_dtype="int8")
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float64 and "exp_avg_scale" not in optimizer.state[p]


def test_every_second_element_with_8_bits():
    """zeros_like of a parameter with holes is dense: its order is not that of the scales only where dims are
    permuted.
    """
    p = torch.nn.Parameter(torch.zeros(30, 40)[:, ::2])
    p.grad = torch.randn(30, 20)
    optimizer = FusedAdam([p], state_dtype="int8", lr=0.1)
    optimizer.step()
    torch.testing.assert_close(p.detach(), -0.1 * p.grad.sign(), rtol=2e-2, atol=1e-3)
