"""`trainer(model, criterion, optimizer)`: a training step in one call, with an optimizer of torch's.

The form that onnxruntime's README announced in May 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onnxtrain.training._models import TorchModel, alone


class StepTrainer:
    """See trainer()."""

    def __init__(self, model: torch.nn.Module, criterion: Callable[[Any, Any], Tensor],
                 optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        self.model, self.criterion, self.optimizer = model, criterion, optimizer
        self._models: dict[int, TorchModel] = {}

    def _of(self, count: int) -> TorchModel:
        if count < 2:
            raise TypeError("step() and evaluate() take the model's inputs and then the criterion's target")
        if count not in self._models:
            self._models[count] = TorchModel(self.model, self.criterion, [(str(i), []) for i in range(count)], [],
                                             by_position=True)
        return self._models[count]

    def step(self, *inputs: object) -> tuple[Tensor, Any]:
        """Forward, backward, ``optimizer.step()``.

        Args:
            inputs: forward's arguments, and last the criterion's target.

        Returns:
            The loss, and the module's output: a tensor, or a list of tensors. Detached.
        """
        self.optimizer.zero_grad()
        loss, *prediction = self._of(len(inputs))(inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), alone([tensor.detach() for tensor in prediction])

    def evaluate(self, *inputs: object) -> tuple[Tensor, Any]:
        """The same in evaluation, with nothing updated."""
        loss, *prediction = self._of(len(inputs)).evaluate(inputs)
        return loss, alone(prediction)


def trainer(model: torch.nn.Module, criterion: Callable[[Any, Any], Tensor],
            optimizer: torch.optim.Optimizer) -> StepTrainer:
    """Something whose ``step(x, y)`` trains the model by one batch, in the engine, and gives ``(loss, prediction)``.

    Args:
        model: any torch.nn.Module; its parameters are trained where they are.
        criterion: of the module's output and a target gives the loss: a module or a function.
        optimizer: of the model's parameters, of torch.optim or onnxtrain.optim.

    Raises:
        TypeError: an argument is of another type.
    """
    return StepTrainer(model, criterion, optimizer)
