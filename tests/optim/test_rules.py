"""Each rule takes the 200 steps of torch.optim, or of the formulas where torch has no such optimizer."""

from __future__ import annotations

import functools
from functools import partial

import pytest
import torch
from problem import Problem, Reference, adam, lamb, lion, make_params, trajectory

from onnxtrain.optim import SGD, Adagrad, AdamWMode, FusedAdam, Lamb, Lion

TORCH = AdamWMode.ADAMW_TORCH

# name: (ours, theirs), each a function of the parameters
CASES = {}


def add(name, ours, theirs):
    CASES[name] = (ours, theirs)


def both(name, cls, peer, ours=None, **options):
    add(name, lambda p: cls(p, **options, **(ours or {})), lambda p: peer(p, **options))


both("adamw", FusedAdam, torch.optim.AdamW, {"adam_w_mode": TORCH}, lr=1e-2, eps=1e-8, weight_decay=0.0)
both("adamw decay", FusedAdam, torch.optim.AdamW, {"adam_w_mode": TORCH}, lr=1e-2, eps=1e-8, weight_decay=0.3)
both("adamw betas", FusedAdam, torch.optim.AdamW, {"adam_w_mode": TORCH}, lr=1e-2, betas=(0.5, 0.7), eps=1e-4,
     weight_decay=0.0)
both("adamw beta 0", FusedAdam, torch.optim.AdamW, {"adam_w_mode": TORCH}, lr=1e-2, betas=(0.0, 0.9), eps=1e-8,
     weight_decay=0.02)
both("adamw amsgrad", FusedAdam, torch.optim.AdamW, {"adam_w_mode": TORCH}, lr=1e-2, eps=1e-8, amsgrad=True,
     weight_decay=0.1)
both("adamw maximize", FusedAdam, torch.optim.AdamW, {"adam_w_mode": TORCH}, lr=1e-3, eps=1e-8, maximize=True,
     weight_decay=0.02)
both("adamw tensor lr", FusedAdam, torch.optim.AdamW, {"adam_w_mode": TORCH},
     lr=torch.tensor(1e-2, dtype=torch.float64),
     eps=1e-8, weight_decay=0.0)
add("adam l2 as torch's", lambda p: _torch_l2(p), lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1))
both("sgd", SGD, torch.optim.SGD, lr=1e-2)
both("sgd decay", SGD, torch.optim.SGD, lr=1e-2, weight_decay=0.1)
both("sgd momentum", SGD, torch.optim.SGD, lr=1e-2, momentum=0.9)
both("sgd dampening", SGD, torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1)
both("sgd nesterov", SGD, torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)
both("sgd maximize", SGD, torch.optim.SGD, lr=1e-3, momentum=0.5, maximize=True)
both("adagrad", Adagrad, torch.optim.Adagrad, lr=1e-1)
both("adagrad options", Adagrad, torch.optim.Adagrad, lr=1e-1, lr_decay=0.01, weight_decay=0.1,
     initial_accumulator_value=0.5, eps=1e-3)
both("adagrad maximize", Adagrad, torch.optim.Adagrad, lr=1e-1, maximize=True)
for mode in (0, 1, 2):
    for correct in (False, True):
        options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2, "bias_correction": correct}
        add(f"adam mode {mode} {'with' if correct else 'without'} correction",
            partial(lambda options, mode, p: FusedAdam(p, adam_w_mode=AdamWMode(mode), **options), options, mode),
            partial(lambda options, mode, p: Reference(p, adam, mode=mode, **options), options, mode))
LAMB = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": True}
for name, changed in {"lamb": {}, "lamb no decay": {"weight_decay": 0.0},
                      "lamb uncorrected": {"bias_correction": False},
                      "lamb maximize": {"maximize": True}, "lamb limits": {"ratio_min": 0.3, "ratio_max": 1.5}}.items():
    add(name, partial(lambda o, p: Lamb(p, **o), LAMB | changed),
        partial(lambda o, p: Reference(p, lamb, **o), LAMB | changed))
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
for name, changed in {"lion": {}, "lion betas": {"betas": (0.5, 0.6)}, "lion maximize": {"maximize": True}}.items():
    add(name, partial(lambda o, p: Lion(p, **o), LION | changed),
        partial(lambda o, p: Reference(p, lion, **o), LION | changed))


def _torch_l2(params):
    """The order of torch.optim.Adam comes in with its state dict only."""
    optimizer = FusedAdam(params)
    optimizer.load_state_dict(torch.optim.Adam(params, lr=1e-2, weight_decay=0.1).state_dict())
    return optimizer


@functools.cache
def exact(name):
    return trajectory(CASES[name][1], torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_same_in_double(name):
    start = make_params()
    for i, (a, b) in enumerate(zip(trajectory(CASES[name][0], torch.float64), exact(name))):
        assert not torch.equal(a, start[i]), "nothing happened"
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m: f"{name}, tensor {i}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_as_accurate_in_float(name):
    """Against the double trajectory, float32 is no further off than three times what torch's float32 is."""
    ours, theirs = CASES[name]
    for a, b, e in zip(trajectory(ours, torch.float32), trajectory(theirs, torch.float32), exact(name)):
        assert a.dtype == torch.float32
        error, allowed = (a.double() - e).abs().max().item(), (b.double() - e).abs().max().item()
        # Lion takes the sign of what may be a rounding error: one step either way
        slack = 4e-3 if name.startswith("lion") else 1e-5
        assert error <= 3 * allowed + slack, (error, allowed)


@pytest.mark.parametrize("limits", [(0.0, 0.25), (3.0, 5.0), (0.0, float("inf"))])
def test_lamb_without_a_norm(limits):
    """A weight of zeros, or a step of zeros, has the ratio 1, whatever its limits are, as onnxruntime-training has it;
    other weights keep to them.
    """
    zeros, still, other = torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(
        torch.ones(4))
    gradient = torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0])
    zeros.grad, still.grad, other.grad = gradient, torch.zeros(3), gradient[:4].clone()
    Lamb([zeros, still, other], lr=0.1, betas=(0.0, 0.0), eps=1e-6, bias_correction=False, ratio_min=limits[0],
         ratio_max=limits[1]).step()
    torch.testing.assert_close(zeros.data, -0.1 * gradient.sign())  # with these betas a step is the sign
    assert torch.equal(still.data, torch.ones(3))
    ratio = min(max(1.0, limits[0]), limits[1])
    torch.testing.assert_close(other.data, 1 - 0.1 * ratio * gradient[:4].sign())


SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=201),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=7),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=3),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers(kind, tensor_lr):
    def drive(make):
        scheduler = []

        def every_step(optimizer, i):
            if not scheduler:
                scheduler.append(SCHEDULERS[kind](optimizer))
            elif kind == "plateau":
                scheduler[0].step(1.0)
            else:
                scheduler[0].step()
        return trajectory(make, torch.float64, 150, every_step)

    def lr():
        return torch.tensor(0.01, dtype=torch.float64) if tensor_lr else 0.01

    ours = drive(lambda p: FusedAdam(p, lr=lr(), eps=1e-8, adam_w_mode=TORCH, weight_decay=0.01))
    theirs = drive(lambda p: torch.optim.AdamW(p, lr=lr(), eps=1e-8))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_groups_with_their_own_options_and_a_group_added_later():
    def drive(cls, **options):
        params = make_params(shapes=[(7, 3), (11,), (4,)])
        problem = Problem(params)
        optimizer = cls([{"params": params[:1], "lr": 0.03, "weight_decay": 0.2},
                         {"params": params[1:2], "betas": (0.5, 0.6)}],
                        lr=0.01, eps=1e-8, **options)
        for i in range(100):
            if i == 40:
                optimizer.add_param_group({"params": params[2:], "lr": 0.1})
            problem.set_grads()
            if i % 3 == 0:
                params[0].grad = None
            optimizer.step()
        return params

    for a, b in zip(drive(FusedAdam, adam_w_mode=TORCH, weight_decay=0.01), drive(torch.optim.AdamW)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
