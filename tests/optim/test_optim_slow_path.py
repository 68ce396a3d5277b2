"""A step follows tensors, state and memory that are others than in the step before."""

from __future__ import annotations

import pytest
import torch
from problem import Problem, make_params
from test_step import adamw

from onnxtrain.optim import AdamWMode, FusedAdam


def test_state_that_does_not_fit_is_refused():
    for change, message in ((lambda s: s.update(exp_avg=torch.zeros(2)), "the first state has another shape"),
                            (lambda s: s.update(exp_avg=torch.zeros(3, dtype=torch.int64)), "the first state is int64"),
                            (lambda s: s.update(step=torch.zeros(2)), "its step is not a float32 or float64 number")):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optimizer = FusedAdam([p])
        optimizer.step()
        before = p.detach().clone()
        change(optimizer.state[p])
        with pytest.raises((ValueError, TypeError), match=message):
            optimizer.step()
        assert torch.equal(p, before)


def test_memory_that_changes_under_an_object_is_seen():
    """Objects stay, but their memory, size, dtype or order becomes another one: by set_, resize_, .data and swap."""
    def changes(p, state):
        yield lambda: p.set_(torch.linspace(1, 2, 12).view(3, 4))
        yield lambda: p.grad.set_(torch.linspace(-1, 1, 12).view(3, 4))
        yield lambda: state["exp_avg"].set_(torch.full((3, 4), 0.25))
        yield lambda: setattr(p, "data", torch.linspace(1, 3, 12).view(4, 3).t())
        yield lambda: setattr(p.grad, "data", torch.linspace(-2, 1, 12).view(4, 3).t())
        every_second = torch.linspace(0, 1, 24, dtype=torch.float64).view(3, 8)[:, ::2]
        yield lambda: setattr(state["exp_avg_sq"], "data", every_second)
        yield lambda: state["step"].set_(torch.tensor(7.0))
        yield lambda: p.untyped_storage().resize_(1 << 16)
        yield lambda: torch.utils.swap_tensors(state["exp_avg"], torch.full((3, 4), 0.5))

    def drive(cls, **options):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        p.grad = torch.full((3, 4), 0.5)
        optimizer = cls([p], lr=0.01, **options)
        for _ in range(2):
            optimizer.step()
        trail = []
        for change in changes(p, optimizer.state[p]):
            with torch.no_grad():
                change()
            for _ in range(2):
                optimizer.step()
                trail.append(p.detach().clone())
        return trail

    ours = drive(FusedAdam, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH, weight_decay=0.01)
    theirs = drive(torch.optim.AdamW, foreach=False)
    assert len(ours) == 18
    for i, (a, b) in enumerate(zip(ours, theirs)):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6, msg=lambda m: f"after {i // 2 + 1} changes: {m}")
    p = torch.nn.Parameter(torch.ones(6))
    p.grad = torch.ones(6)
    optimizer = FusedAdam([p])
    optimizer.step()
    p.data = torch.ones(4)
    with pytest.raises(ValueError, match="the gradient has another shape than the parameter"):
        optimizer.step()


def test_replaced_tensors_are_followed():
    """Parameters, gradients and state may be other objects or memory at every step."""
    ours, theirs = make_params(), make_params()
    a, b = adamw(ours), torch.optim.AdamW(theirs, lr=0.01)
    one, two = Problem(ours), Problem(theirs)
    for step in range(30):
        one.set_grads()
        two.set_grads()
        if step % 5 == 1:
            for p in ours:
                p.data = p.data.clone()
        if step % 5 == 2:
            for p in ours:
                a.state[p] = {k: v.clone() for k, v in a.state[p].items()}
        if step % 5 == 3:
            a.state[ours[1]]["exp_avg"] = a.state[ours[1]]["exp_avg"].clone()
        if step == 14:
            for optimizer, params in ((a, ours), (b, theirs)):
                del optimizer.state[params[2]]
        if step == 20:
            ours[0].grad = theirs[0].grad = None
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
