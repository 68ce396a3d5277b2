"""What the loss is multiplied by before backward, so that float16 gradients neither vanish nor overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtrain.training._validation import check, is_count, is_number

if TYPE_CHECKING:
    from onnxtrain.training._info import TrainStepInfo


def _is_positive(value: float) -> bool:
    return is_number(value) and value > 0


class LossScaler:
    """Base: a subclass says in update() what the next scale is.

    Args:
        loss_scale: the first scale, above 0.

    Raises:
        AssertionError: loss_scale is not above 0.
    """

    def __init__(self, loss_scale: float) -> None:
        self._input_name: str | None = None
        self.loss_scale = loss_scale
        self._initial_loss_scale = self._loss_scale

    @property
    def input_name(self) -> str | None:
        """What a trainer calls the input that the scale is; None before it does."""
        return self._input_name

    @input_name.setter
    def input_name(self, name: str) -> None:
        check(isinstance(name, str) and bool(name), "'input_name' must be a non-empty string")
        self._input_name = name

    @property
    def loss_scale(self) -> float:
        """The scale of the coming step."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        check(_is_positive(loss_scale), "'loss_scale' must be a positive float")
        self._loss_scale = float(loss_scale)

    def reset(self) -> None:
        """Back to the first scale."""
        self._loss_scale = self._initial_loss_scale

    def update(self, train_step_info: TrainStepInfo) -> float:
        """After a step whose gradients were finite or not (``train_step_info.all_finite``): sets and returns the scale
        of the next one.
        """
        raise NotImplementedError


class DynamicLossScaler(LossScaler):
    """Doubles the scale after up_scale_window finite steps in a row, and halves it after one that was not.

    Args:
        automatic_update: False keeps the scale as it is.
        loss_scale: the first scale.
        up_scale_window: finite steps before it is doubled.
        min_loss_scale, max_loss_scale: its limits.

    Raises:
        AssertionError: an argument is of another type or out of range.
    """

    def __init__(self, automatic_update: bool = True, loss_scale: float = float(1 << 16), up_scale_window: int = 2000,
                 min_loss_scale: float = 1.0, max_loss_scale: float = float(1 << 24)) -> None:
        super().__init__(loss_scale)
        check(isinstance(automatic_update, bool), "'automatic_update' must be a boolean")
        check(is_count(up_scale_window, 1), "'up_scale_window' must be a positive integer")
        check(_is_positive(min_loss_scale), "'min_loss_scale' must be a positive float")
        check(_is_positive(max_loss_scale), "'max_loss_scale' must be a positive float")
        check(min_loss_scale <= max_loss_scale, "'min_loss_scale' must be at most 'max_loss_scale'")
        self.automatic_update, self.up_scale_window = automatic_update, up_scale_window
        self.min_loss_scale, self.max_loss_scale = float(min_loss_scale), float(max_loss_scale)
        self._stable_steps_count = 0

    def reset(self) -> None:
        """Back to the first scale, with no finite step so far."""
        super().reset()
        self._stable_steps_count = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        """See LossScaler."""
        if not self.automatic_update:
            return self._loss_scale
        if train_step_info.all_finite:
            self._stable_steps_count += 1
            if self._stable_steps_count >= self.up_scale_window:
                self._loss_scale = min(self.max_loss_scale, self._loss_scale * 2)
                self._stable_steps_count = 0
        else:
            self._loss_scale = max(self.min_loss_scale, self._loss_scale / 2)
            self._stable_steps_count = 0
        return self._loss_scale
