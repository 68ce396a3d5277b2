"""What one step does around the rule: clipping, scaling, and gradients that are views or mostly zeros."""

from __future__ import annotations

import pytest
import torch
from problem import Problem, make_params, trajectory

from onnxtrain.optim import SGD, Adagrad, AdamWMode, FusedAdam, Lamb, Lion

ALL = {"adam": FusedAdam, "sgd": SGD, "adagrad": Adagrad, "lamb": Lamb, "lion": Lion}
TORCH = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.01}


def adamw(params, **options):
    return FusedAdam(params, adam_w_mode=AdamWMode.ADAMW_TORCH, **{**TORCH, **options})


@pytest.mark.parametrize("limit", [0.05, 1.0, 1e6, 0.0])
def test_clipping_is_torchs_and_leaves_gradients_alone(limit):
    ours, theirs = make_params(), make_params()
    a, b = adamw(ours, max_grad_norm=limit), torch.optim.AdamW(theirs, lr=0.01)
    one, two = Problem(ours), Problem(theirs)
    for _ in range(50):
        one.set_grads()
        two.set_grads()
        expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
        kept = [p.grad.clone() for p in ours]
        norm = a.step()
        b.step()
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
        assert a.grad_norm == pytest.approx(expected.item(), rel=1e-12)
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, kept))
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_of_very_large_and_very_small_gradients(dtype):
    big = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}[dtype]
    small = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 6e-8}[dtype]
    for value in (big, small):
        p = torch.nn.Parameter(torch.zeros(5000, dtype=dtype))
        p.grad = torch.full_like(p, value)
        optimizer = SGD([p], lr=0.0, max_grad_norm=1.0)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(p.grad.double().norm().item(), rel=1e-5)


# ---- GradScaler ----

def scaled(make, clip=None, fused_clip=None):
    """float32 training under a scaler whose scale doubles often, so that steps overflow and are skipped."""
    params = make_params(dtype=torch.float32)
    problem, optimizer = Problem(params), make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4)
    skipped, scales = 0, []
    for _ in range(60):
        problem.set_grads()
        for p in params:
            p.grad = scaler.scale(p.grad)
        before = [p.detach().clone() for p in params]
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()
        skipped += all(torch.equal(p, b) for p, b in zip(params, before))
        scales.append(scaler.get_scale())
    return params, skipped, scales


def test_grad_scaler():
    ours, skipped, scales = scaled(adamw)
    theirs, skipped_there, scales_there = scaled(lambda p: torch.optim.AdamW(p, lr=0.01))
    assert skipped == skipped_there and 3 < skipped < 40 and scales == scales_there
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_with_clipping(fused):
    ours, skipped, _ = scaled(lambda p: adamw(p, max_grad_norm=0.5 if fused else None), clip=None if fused else 0.5)
    theirs, skipped_there, _ = scaled(lambda p: torch.optim.AdamW(p, lr=0.01), clip=0.5)
    assert skipped == skipped_there > 3
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_skipped_step_touches_nothing():
    params = make_params()
    optimizer = FusedAdam(params, max_grad_norm=1.0)
    Problem(params).set_grads()
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
    before = [p.detach().clone() for p in params]
    assert optimizer.step() is None and optimizer.grad_norm is None and not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(params, before))


def test_gradients_stay_scaled():
    """found_inf and grad_scale are read in the pass that updates: no gradient is unscaled in memory."""
    params, twins = make_params(dtype=torch.float32), make_params(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    optimizer, twin = adamw(params, max_grad_norm=0.5), adamw(twins, max_grad_norm=0.5)
    one, two = Problem(params), Problem(twins)
    for _ in range(5):
        one.set_grads()
        two.set_grads()
        for p in params:
            p.grad = scaler.scale(p.grad)
        before = [p.grad.clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        twin.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before)) and scaler.get_scale() == 1024
        assert optimizer.grad_norm == pytest.approx(twin.grad_norm, rel=1e-6)
    assert all(map(torch.equal, params, twins)), "a power of two scales exactly"


# ---- the step's surroundings ----


def test_same_trajectory_with_and_without_gradient_views():
    """A gradient that is a slice of a bucket, as DDP makes them."""
    def bucketed(optimizer, _):
        params = optimizer.param_groups[0]["params"]
        flat = torch.cat([p.grad.flatten() for p in params])
        at = 0
        for p in params:
            p.grad = flat[at:at + p.numel()].view_as(p)
            at += p.numel()

    for a, b in zip(trajectory(adamw, torch.float32, 20, bucketed), trajectory(adamw, torch.float32, 20)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"momentum": 0.9},
                                     {"scale": float("inf")}], ids=str)
def test_sgd_where_most_rows_of_a_gradient_are_zero(options, dtype):
    """An embedding's: such rows keep every bit as far as torch's do; a penalty or an infinite factor reaches them."""
    ours, theirs = make_params(dtype=dtype, shapes=[(300, 100)]), make_params(dtype=dtype, shapes=[(300, 100)])
    grad = torch.zeros(300, 100, dtype=dtype)
    grad[[3, 117, 118, 299]] = torch.randn(4, 100).to(dtype)
    grad[7, 3] = -0.0
    for p in (*ours, *theirs):
        p.grad = grad.clone()
        with torch.no_grad():
            p[20], p[21, :3] = -0.0, torch.tensor([torch.inf, -torch.inf, torch.nan])
    before = ours[0].detach().clone()
    options = {"lr": 0.1, **options}
    scale = options.pop("scale", 1.0)
    optimizer = SGD(ours, **options)
    optimizer.next_unscale = scale
    optimizer.step()
    theirs[0].grad *= scale
    torch.optim.SGD(theirs, **options).step()
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    still = (grad == 0).all(1)
    if scale == 1 and "weight_decay" not in options:
        same = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        still[7] = still[20] = False  # a zero's sign: of what rounds the same way
        assert torch.equal(ours[0][still].view(same), before[still].view(same))
        assert torch.equal(ours[0][20], before[20])
