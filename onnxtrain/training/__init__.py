"""The trainer API of ONNX Runtime Training on onnxtrain's engine: ORTTrainer and what it takes. See docs/trainer.md."""

from onnxtrain.training import amp, checkpoint, model_desc_validation, optim, orttrainer, orttrainer_options
from onnxtrain.training._info import TrainStepInfo
from onnxtrain.training.orttrainer import ORTTrainer
from onnxtrain.training.orttrainer_options import ORTTrainerOptions, PropagateCastOpsStrategy

__all__ = ["ORTTrainer", "ORTTrainerOptions", "PropagateCastOpsStrategy", "TrainStepInfo", "amp", "checkpoint",
           "model_desc_validation", "optim", "orttrainer", "orttrainer_options"]
