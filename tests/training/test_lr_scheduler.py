"""Each scheduler gives the learning rates of its formula, and refuses wrong values."""

import math

import pytest

from onnxtrain.training import TrainStepInfo, optim

WARM = [0.0, 0.2, 0.4, 0.6, 0.8]
CASES = {
    "constant": (lambda: optim.ConstantWarmupLRScheduler(10, 0.5), [*WARM, 1, 1, 1, 1, 1, 1]),
    "cosine": (lambda: optim.CosineWarmupLRScheduler(10, 0.5, 0.5),
               [*WARM, *((1 + math.cos(math.pi * k / 5)) / 2 for k in range(6))]),
    "cosine, two waves": (lambda: optim.CosineWarmupLRScheduler(10, 2.0, 0.0),
                          [(1 + math.cos(4 * math.pi * k / 10)) / 2 for k in range(10)]),
    "linear": (lambda: optim.LinearWarmupLRScheduler(10, 0.5), [*WARM, 1, 0.8, 0.6, 0.4, 0.2, 0, 0]),
    "poly": (lambda: optim.PolyWarmupLRScheduler(10, 0.1, 2.0, 0.5),
             [*WARM, *(0.9 * (1 - k / 5) ** 2 + 0.1 for k in range(6)), 0.1, 0.1]),
}


@pytest.mark.parametrize("name", CASES)
def test_scheduler(name):
    make, expected = CASES[name]
    scheduler, base = make(), 2.0 if name != "poly" else 1.0
    assert scheduler.get_last_lr() == []
    for k, value in enumerate(expected):
        info = TrainStepInfo(optim.SGDConfig(lr=base), optimization_step=k)
        scheduler._step(info)
        assert scheduler.get_last_lr() == pytest.approx([base * value], abs=1e-12)


@pytest.mark.parametrize("make, message", [
    (lambda: optim.ConstantWarmupLRScheduler(0), "total_steps must be a strict positive number"),
    (lambda: optim.ConstantWarmupLRScheduler(1.0), "total_steps must be a strict positive number"),
    (lambda: optim.LinearWarmupLRScheduler(1, 1.0), "warmup must be a float"),
    (lambda: optim.LinearWarmupLRScheduler(1, 0), "warmup must be a float"),
    (lambda: optim.CosineWarmupLRScheduler(1, 0.0), "cycles must be a positive float"),
    (lambda: optim.PolyWarmupLRScheduler(1, -1.0), "lr_end must be a positive float"),
    (lambda: optim.PolyWarmupLRScheduler(1, power=1), "power must be a positive float"),
    (lambda: optim.PolyWarmupLRScheduler(1, 1.0).get_lr(TrainStepInfo(optim.SGDConfig())), "must be smaller than"),
    (lambda: optim.ConstantWarmupLRScheduler(1)._step(None), "must be a TrainStepInfo"),
])
def test_scheduler_errors(make, message):
    with pytest.raises(AssertionError, match=message):
        make()
