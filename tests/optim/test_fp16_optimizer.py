"""FP16_Optimizer where no other library is needed: what it refuses,
and Apex's attributes by stand-ins.
"""

from __future__ import annotations

import math
import types

import pytest
import torch

from onnxtrain.optim import SGD
from onnxtrain.optim.fp16_optimizer import FP16_Optimizer


def test_unknown_types_are_left_alone_with_a_warning():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    before = dict(optimizer.__dict__)
    with pytest.warns(UserWarning, match="leaves torch.optim.sgd.SGD unchanged: onnxtrain does not know this type"):
        assert FP16_Optimizer(optimizer) is optimizer
    assert optimizer.__dict__ == before


def zero_like(source: str) -> object:
    space: dict = {}
    exec(source, space)
    cls = space["DeepSpeedZeroOptimizer"]
    cls.__module__ = "deepspeed.runtime.zero.stage_1_and_2"
    return cls()


def test_unknown_versions_of_deepspeed_are_left_alone_with_a_warning():
    optimizer = zero_like("class DeepSpeedZeroOptimizer:\n    def has_overflow_serial(self, params): return 'new'\n")
    with pytest.warns(UserWarning,
                      match=r"unchanged: onnxtrain does not know has_overflow_serial\(\) of this version of DeepSpeed"):
        FP16_Optimizer(optimizer)
    assert optimizer.has_overflow_serial([]) == "new" and not vars(optimizer)


def test_subclasses_are_left_alone():
    class Mine(SGD):
        pass

    Mine.__module__, Mine.__qualname__ = "deepspeed.runtime.zenflow", "ZenFlowZeroOptimizer"
    with pytest.warns(UserWarning, match="onnxtrain does not know this type"):
        FP16_Optimizer(Mine([torch.nn.Parameter(torch.ones(2))]))


# ---- Apex AMP, O2: the attributes that its optimizers have after amp.initialize, on the CPU ----

class Scaler:
    def __init__(self, scale: float, dynamic: bool = True) -> None:
        self.scale, self.dynamic, self._has_overflow = scale, dynamic, False

    def loss_scale(self) -> float:
        return self.scale


def drawn(shape, generator: torch.Generator) -> torch.Tensor:
    """The same numbers on every default device."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def apex(seed: int) -> torch.optim.Optimizer:
    generator = torch.Generator("cpu").manual_seed(seed)
    halves = [torch.nn.Parameter(drawn(n, generator).half()) for n in (7, 300)]
    masters = [torch.nn.Parameter(p.detach().float()) for p in halves]
    own = [torch.nn.Parameter(drawn(5, generator)), torch.nn.Parameter(drawn(2, generator))]
    optimizer = torch.optim.SGD(masters + own, lr=0.1)
    optimizer._amp_stash = types.SimpleNamespace(
        all_fp16_params=halves, all_fp32_from_fp16_params=masters, all_fp32_from_fp32_params=own,
        all_fp32_from_fp32_grad_stash=[None] * len(own))
    optimizer._amp_lazy_init = lambda: None

    def post_backward_with_master_weights(self, scaler):
        """What must come out: each gradient times 1 / scale, added to what was there."""
        stash = self._amp_stash
        for p, m in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params):
            if p.grad is not None:
                g = p.grad.float() / scaler.loss_scale()
                scaler._has_overflow |= not bool(torch.isfinite(p.grad).all())
                m.grad = g if m.grad is None else m.grad + g
        for i, p in enumerate(stash.all_fp32_from_fp32_params):
            held, stash.all_fp32_from_fp32_grad_stash[i] = stash.all_fp32_from_fp32_grad_stash[i], None
            if p.grad is not None:
                scaler._has_overflow |= not bool(torch.isfinite(p.grad).all())
                p.grad = p.grad / scaler.loss_scale() + (held if held is not None else 0)
            else:
                p.grad = held

    optimizer._post_amp_backward = types.MethodType(post_backward_with_master_weights, optimizer)
    return optimizer


def backward(optimizer, seed: int, bad: float | None = None, skip: int = -1) -> None:
    """Gradients as Apex leaves them: its _prepare_amp_backward has put earlier ones aside."""
    stash = optimizer._amp_stash
    generator = torch.Generator("cpu").manual_seed(seed)
    for i, p in enumerate((*stash.all_fp16_params, *stash.all_fp32_from_fp32_params)):
        if p.dtype == torch.float32:
            stash.all_fp32_from_fp32_grad_stash[i - len(stash.all_fp16_params)] = p.grad
        p.grad = None if i == skip else (drawn(p.shape, generator) * 64).to(p.dtype)
    if bad is not None:
        stash.all_fp16_params[1].grad[200] = bad


def all_grads(optimizer) -> list:
    stash = optimizer._amp_stash
    return [p.grad for p in (*stash.all_fp32_from_fp16_params, *stash.all_fp32_from_fp32_params)]


def test_apex():
    ours, theirs = apex(0), apex(0)
    assert FP16_Optimizer(ours) is ours and FP16_Optimizer(ours) is ours
    for round_, skip in enumerate((-1, 0, 2, -1)):
        for optimizer in (ours, theirs):
            for seed in range(3):  # three backwards before the step
                backward(optimizer, 10 * round_ + seed, skip=skip if seed < 2 else -1)
                scaler = Scaler(64.0)
                optimizer._post_amp_backward(scaler)
                assert not scaler._has_overflow
        for a, b in zip(all_grads(ours), all_grads(theirs)):
            torch.testing.assert_close(a, b)
        for optimizer in (ours, theirs):
            optimizer.step()
            for p in optimizer.param_groups[0]["params"]:
                p.grad = None
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"]):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dynamic", [True, False])
def test_apex_overflow(bad, dynamic):
    optimizer = FP16_Optimizer(apex(0))
    backward(optimizer, 0, bad)
    scaler = Scaler(8.0, dynamic)
    optimizer._post_amp_backward(scaler)
    assert scaler._has_overflow == dynamic


def test_apex_at_other_levels_is_left_alone():
    optimizer = apex(0)
    optimizer._post_amp_backward = types.MethodType(lambda self, scaler: None, optimizer)
    with pytest.warns(UserWarning, match="not the master weights of Apex AMP's O2"):
        FP16_Optimizer(optimizer)
