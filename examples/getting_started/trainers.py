"""Steps of the sample by both forms of ORTTrainer, for train_ort.py: SGD, which ORTTrainer does not clip."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import onnxtrain.compat.onnxruntime  # noqa: F401

# isort: split
from onnxruntime.capi.ort_trainer import IODescription, ModelDescription
from onnxruntime.capi.ort_trainer import ORTTrainer as LegacyORTTrainer
from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim


class Trainer:
    """The form of 1.5 to 1.16."""

    def __init__(self, model: nn.Module, vocabulary: int, lr: float) -> None:
        self.lr = lr
        self._trainer = ORTTrainer(
            model, {"inputs": [("tokens", ["bptt", "batch"]), ("targets", ["bptt_x_batch"])],
                    "outputs": [("loss", [], True), ("logits", ["bptt", "batch", vocabulary])]},
            optim.SGDConfig(lr=lr), loss_fn=loss_of(vocabulary),
            options=ORTTrainerOptions({"device": {"id": "cpu"}}))

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One step; the loss."""
        self._trainer.optim_config.lr = self.lr
        return self._trainer.train_step(inputs, targets)[0]


class Legacy:
    """The form before 1.5, which is given the rate at each step."""

    def __init__(self, model: nn.Module, vocabulary: int, lr: float) -> None:
        self.lr = lr
        self._trainer = LegacyORTTrainer(
            model, loss_of(vocabulary),
            ModelDescription([IODescription("tokens", ["bptt", "batch"]), IODescription("targets", ["bptt_x_batch"])],
                             [IODescription("loss", []), IODescription("logits", ["bptt", "batch", vocabulary])]),
            "SGDOptimizer", None, IODescription("Learning_Rate", [1], torch.float32), torch.device("cpu"))

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One step; the loss."""
        return self._trainer.train_step(inputs, targets, torch.tensor([self.lr]))[0]


def loss_of(vocabulary: int):  # noqa: ANN201
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.view(-1, vocabulary), targets)
    return loss


LOOPS = {"trainer": Trainer, "legacy": Legacy}
