"""What an ORTTrainer, its learning-rate scheduler and its loss scaler tell each other."""

from __future__ import annotations

from typing import Any

from onnxtrain.training._validation import check, is_count
from onnxtrain.training.optim.config import _OptimizerConfig


class TrainStepInfo:
    """The state of a training run.

    Args:
        optimizer_config: an SGDConfig, AdamConfig or LambConfig.
        all_finite: whether the gradients of the latest update were finite.
        fetches: names of the outputs that steps return; empty for all.
        optimization_step: updates so far, those left out for gradients that were not finite not counted.
        step: calls of train_step() so far.

    Raises:
        AssertionError: a value is of another type, or negative.
    """

    def __init__(self, optimizer_config: _OptimizerConfig, all_finite: bool = True, fetches: Any = (),
                 optimization_step: int = 0, step: int = 0) -> None:
        fetches = [] if fetches is None or fetches == () else fetches
        check(isinstance(optimizer_config, _OptimizerConfig), "'optimizer_config' must be an optimizer configuration")
        check(isinstance(all_finite, bool), "'all_finite' must be a boolean")
        check(isinstance(fetches, list) and all(isinstance(name, str) for name in fetches),
              "'fetches' must be a list of strings")
        check(is_count(optimization_step), "'optimization_step' must be a non-negative integer")
        check(is_count(step), "'step' must be a non-negative integer")
        self.optimizer_config = optimizer_config
        self.all_finite = all_finite
        self.fetches: list[str] = fetches
        self.optimization_step = optimization_step
        self.step = step
