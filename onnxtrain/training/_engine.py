"""One training step of a model: loss, backward, accumulation, scaling, update. Both trainers share it.

It knows no descriptions and no options: orttrainer.py and legacy.py read those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxtrain.training._models import TorchModel
from onnxtrain.training._onnx_model import OnnxModel
from onnxtrain.training._update import Update


class Engine:
    """A model that is being trained.

    Args:
        model: what is trained.
        optimizer: name of the optimizer.
        hyperparameters: of a weight's name gives its hyperparameters.
        frozen: names of weights that stay as they are; they are marked so (``requires_grad``). So are parameters of a
            module that are marked already.
        clip: whether Adam and LAMB clip gradients.
        accumulation: calls of step() for one update.
        mixed_precision: run under autocast to float16, and leave updates out whose gradients are not finite.
        deterministic: use torch's and the engine's deterministic algorithms.
        device: where the weights are moved to.

    Raises:
        RuntimeError: a frozen weight is none of the model's; device is one of CUDA, and torch has none.
    """

    def __init__(self, model: TorchModel | OnnxModel, optimizer: str, hyperparameters: Callable[[str], dict[str, Any]],
                 frozen: Sequence[str] = (), clip: bool = True, accumulation: int = 1, mixed_precision: bool = False,
                 deterministic: bool = False, device: str = "cpu") -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"the trainer's device is '{device}', and torch has no CUDA device here: ask for 'cpu' "
                               "(ORTTrainerOptions({'device': {'id': 'cpu'}}); the default is 'cuda')")
        self.model = model
        model.to(self.device)
        weights = model.parameters()
        unknown = [name for name in frozen if name not in weights and name not in model.buffers()]
        if unknown:
            raise RuntimeError(f"{unknown} params from 'frozen_weights' not found in the ONNX model.")
        for name in frozen:
            if name in weights:
                weights[name].requires_grad_(False)
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self.update = Update(optimizer, trained, hyperparameters, clip)
        self.accumulation = accumulation
        self.mixed_precision = mixed_precision
        self._deterministic = deterministic

    # ---- weights ----

    def weights(self) -> dict[str, Tensor]:
        """Those that are trained."""
        return dict(self.update.weights)

    def everything(self) -> dict[str, Tensor]:
        """Those that are trained, frozen ones and buffers."""
        return {**self.model.parameters(), **self.model.buffers()}

    @torch.no_grad()
    def load(self, values: dict[str, Tensor]) -> None:
        """Sets weights, frozen ones and buffers; names that are none of the model's are left out.

        Raises:
            ValueError: a value has another shape. Nothing has been set then.
        """
        own = self.everything()
        for name, value in values.items():
            if name in own and own[name].shape != value.shape:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, expected {tuple(own[name].shape)}")
        for name, value in values.items():
            if name in own:
                own[name].copy_(value)

    def accumulated(self, steps: int) -> dict[str, Tensor]:
        """The sums of gradients that wait for an update, after this many steps altogether; copies on the CPU."""
        if not steps % self.accumulation:
            return {}
        return {name: weight.grad.detach().cpu().clone() for name, weight in self.update.weights.items()
                if weight.grad is not None}

    def load_accumulated(self, values: dict[str, Tensor]) -> None:
        """The opposite."""
        for name, weight in self.update.weights.items():
            weight.grad = values[name].to(weight.device, weight.dtype).clone() if name in values else None

    # ---- steps ----

    @contextlib.contextmanager
    def _switches(self, autocast: bool) -> Iterator[None]:
        """Deterministic algorithms where they are asked for; autocast too in forward, but not in backward."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        try:
            if self._deterministic:
                torch.use_deterministic_algorithms(True)
            with torch.autocast(self.device.type, torch.float16) if autocast else contextlib.nullcontext():
                yield
        finally:
            if self._deterministic:
                torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        """The inputs, on the device."""
        return [value.to(self.device) if isinstance(value, Tensor) else value for value in given]

    def forward(self, given: Sequence[Any], loss: int, step: int) -> list[Tensor]:
        """Outputs in training, under autograd.

        Args:
            given: the inputs.
            loss: which output is the loss: float, of one element.
            step: number of this call, from 1; gradients are dropped where it is the first one after an update.

        Raises:
            RuntimeError: the loss is something else.
        """
        if (step - 1) % self.accumulation == 0:
            self.update.zero_grad()
        with self._switches(self.mixed_precision):
            outputs = self.model(self.inputs(given))
        if loss >= len(outputs) or outputs[loss].numel() != 1 or not outputs[loss].is_floating_point():
            raise RuntimeError(f"output {loss} is the loss, which has to be a float of one element; the model's "
                               f"outputs are {[f'{output.dtype} {tuple(output.shape)}' for output in outputs]}")
        return outputs

    def backward(self, loss: Tensor, scale: float) -> None:
        """Adds the gradients of the loss, times scale, to those of the steps before since the last update.

        Raises:
            RuntimeError: there are weights to be trained, and the loss depends on none of them.
        """
        if not loss.requires_grad:
            if self.update.weights:
                raise RuntimeError("the loss depends on no weight that is trained: was it computed from detached "
                                   "tensors?")
            return
        with self._switches(False):
            loss.backward(torch.full_like(loss, scale))

    def evaluate(self, given: Sequence[Any]) -> list[Tensor]:
        """Outputs in evaluation."""
        with self._switches(self.mixed_precision):
            return self.model.evaluate(self.inputs(given))

    def is_update(self, step: int) -> bool:
        """Whether an update follows this step, counted from 1."""
        return step % self.accumulation == 0

    def apply(self, lr: float, scale: float) -> bool:
        """The update; with mixed precision only of finite gradients.

        Args:
            lr: the rate; rounded to float32, which is what a rate that comes as a tensor is.
            scale: of the losses whose gradients these are.

        Returns:
            Whether it has been done.
        """
        return self.update.step(float(np.float32(lr)), 1.0 / (self.accumulation * scale), self.mixed_precision)
