"""A failing allocation at every point of a step: MemoryError, nothing touched,
and the next step goes on as if nothing was.
"""

from __future__ import annotations

import copy

import pytest
import torch
from problem import make_params

from onnxtrain import _C
from onnxtrain.optim import SGD, Adagrad, FusedAdam, Lamb, Lion, clip_grad_norm_

MAKERS = {"adam": lambda p: FusedAdam(p, max_grad_norm=1.0), "int8": lambda p: FusedAdam(p, state_dtype="int8"),
          "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9), "adagrad": Adagrad, "lamb": Lamb, "lion": Lion}


def params_with_grads() -> list:
    params = make_params(dtype=torch.float32, shapes=[(9, 5), (70_001,)]) + [
        torch.nn.Parameter(torch.ones(6, 8)[:, ::2]), torch.nn.Parameter(torch.ones(30, dtype=torch.bfloat16))]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def sweep(attempt) -> int:
    """Fails the first, second, ... allocation of `attempt` until it gets through; returns how many failed."""
    for failed in range(1000):
        _C.fail_allocation_after(failed)
        try:
            attempt()
            passed = True
        except MemoryError:
            passed = False
        finally:
            fired = _C.fail_allocation_after(-1)
        assert passed != fired, "an injected failure must come out as MemoryError"
        if passed:
            return failed
    raise AssertionError("never came through")


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_step(name, steps_before):
    params, twins = params_with_grads(), params_with_grads()
    optimizer, twin = MAKERS[name](params), MAKERS[name](twins)
    for _ in range(steps_before):
        optimizer.step()
        twin.step()
    optimizer._setup()  # with no memory kept from earlier steps
    before, state = copy.deepcopy(params), copy.deepcopy(optimizer.state_dict())

    def attempt():
        try:
            optimizer.step()
        except MemoryError:
            assert all(torch.equal(p, q) for p, q in zip(params, before))
            now = optimizer.state_dict()["state"]
            assert now.keys() == state["state"].keys()
            for key, held in state["state"].items():
                assert all(torch.equal(now[key][k], v) for k, v in held.items())
            raise

    assert sweep(attempt) >= 6
    twin.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twins))


def test_clipping_and_scaling():
    params = params_with_grads()
    assert sweep(lambda: _C.sums_of_squares([p.grad for p in params])) >= 3
    target = [torch.zeros_like(p) for p in params]
    assert sweep(lambda: _C.scale_tensors([p.grad for p in params], target, 2.0, 0.0)) >= 3
    assert all(bool((t == 2).all()) for t in target)
    assert clip_grad_norm_(params, 1.0) > 1


def test_nothing_leaks():
    for _ in range(2):
        before = _C.live_blocks()
        optimizer = FusedAdam(params_with_grads(), max_grad_norm=1.0)
        optimizer.step()
        assert _C.live_blocks() > before
        del optimizer
        assert _C.live_blocks() == before
