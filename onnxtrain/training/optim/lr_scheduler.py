"""Learning rates with a warm-up, of the number of updates so far. An ORTTrainer asks before each update."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from onnxtrain.training._validation import check, is_count

if TYPE_CHECKING:
    from onnxtrain.training._info import TrainStepInfo


class _LRScheduler:
    """Base: a subclass says in get_lr() what the rate of the coming update is."""

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """The rate of the coming update, in a list of one.

        Args:
            train_step_info: its ``optimization_step`` counts the updates so far, and its ``optimizer_config.lr`` is the
                base rate.
        """
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rate of the latest update, in a list of one; an empty list before the first."""
        return self._last_lr

    def _step(self, train_step_info: TrainStepInfo) -> None:
        """Takes the rate of the coming update.

        Raises:
            AssertionError: train_step_info is no TrainStepInfo.
        """
        from onnxtrain.training._info import TrainStepInfo  # which imports this package

        check(isinstance(train_step_info, TrainStepInfo), "train_step_info must be a TrainStepInfo")
        self._last_lr = self.get_lr(train_step_info)


class _Warmup(_LRScheduler):
    """With W = warmup * total_steps, the rate is base * k / max(1, W) for the first updates, k < W; so that of the very
    first one is 0. A subclass says what comes after.
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__()
        check(is_count(total_steps, 1), "total_steps must be a strict positive number")
        check(isinstance(warmup, float) and 0 <= warmup < 1, "warmup must be a float between (0, 1]")
        self.total_steps, self.warmup = total_steps, warmup
        self._warmup_steps = warmup * total_steps

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """See _LRScheduler."""
        k, base = train_step_info.optimization_step, train_step_info.optimizer_config.lr
        if k < self._warmup_steps:
            return [base * k / max(1, self._warmup_steps)]
        return [self._after(k, base)]

    def _after(self, k: int, base: float) -> float:
        raise NotImplementedError


class ConstantWarmupLRScheduler(_Warmup):
    """The base rate after the warm-up.

    Args:
        total_steps: updates altogether, more than 0.
        warmup: share of them that is warm-up, a float in [0, 1).

    Raises:
        AssertionError: an argument is of another type or out of range. The same of the other schedulers.
    """

    def _after(self, k: int, base: float) -> float:
        return base


class CosineWarmupLRScheduler(_Warmup):
    """After the warm-up base * max(0, (1 + cos(2 pi cycles x)) / 2), x going from 0 to 1.

    Args:
        total_steps, warmup: as in ConstantWarmupLRScheduler.
        cycles: waves of the cosine, a float above 0; 0.5 falls to 0 once.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        check(isinstance(cycles, float) and cycles > 0, "cycles must be a positive float")
        self.cycles = cycles

    def _after(self, k: int, base: float) -> float:
        progress = (k - self._warmup_steps) / max(1, self.total_steps - self._warmup_steps)
        return base * max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * self.cycles * progress)))


class LinearWarmupLRScheduler(_Warmup):
    """After the warm-up the rate falls to 0 in a line. Arguments as in ConstantWarmupLRScheduler."""

    def _after(self, k: int, base: float) -> float:
        return base * max(0.0, (self.total_steps - k) / max(1, self.total_steps - self._warmup_steps))


class PolyWarmupLRScheduler(_Warmup):
    """After the warm-up (base - lr_end) (1 - x)^power + lr_end, x going from 0 to 1, then lr_end.

    Args:
        total_steps, warmup: as in ConstantWarmupLRScheduler.
        lr_end: the last rate, a float of at least 0 and below the base rate.
        power: a float of at least 0.
    """

    def __init__(self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        check(isinstance(lr_end, float) and lr_end >= 0, "lr_end must be a positive float")
        check(isinstance(power, float) and power >= 0, "power must be a positive float")
        self.lr_end, self.power = lr_end, power

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """See _LRScheduler.

        Raises:
            AssertionError: lr_end is not below the base rate.
        """
        base = train_step_info.optimizer_config.lr
        check(base > self.lr_end, f"lr_end ({self.lr_end}) must be smaller than initial lr ({base})")
        return super().get_lr(train_step_info)

    def _after(self, k: int, base: float) -> float:
        if k > self.total_steps:
            return self.lr_end
        remaining = 1 - (k - self._warmup_steps) / (self.total_steps - self._warmup_steps)
        return (base - self.lr_end) * remaining ** self.power + self.lr_end
