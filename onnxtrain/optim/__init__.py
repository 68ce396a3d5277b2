"""Optimizers with one pass over memory: drop-in for torch.optim's, and for onnxruntime.training.optim."""

from onnxtrain.optim._adagrad import Adagrad
from onnxtrain.optim._adam import AdamWMode, FusedAdam
from onnxtrain.optim._clip import clip_grad_norm_
from onnxtrain.optim._in_backward import StepInBackward, step_in_backward
from onnxtrain.optim._lamb import Lamb
from onnxtrain.optim._lion import Lion
from onnxtrain.optim._sgd import SGD
from onnxtrain.optim.fp16_optimizer import FP16_Optimizer

__all__ = ["SGD", "Adagrad", "AdamWMode", "FP16_Optimizer", "FusedAdam", "Lamb", "Lion", "StepInBackward",
           "clip_grad_norm_", "step_in_backward"]
