"""Optimizer configurations and learning-rate schedulers of ORTTrainer, beside the optimizers of onnxtrain.optim."""

from onnxtrain.optim import *  # noqa: F403
from onnxtrain.optim import __all__ as _optimizers
from onnxtrain.optim import fp16_optimizer as fp16_optimizer
from onnxtrain.training.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from onnxtrain.training.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
)

__all__ = ["AdamConfig", "ConstantWarmupLRScheduler", "CosineWarmupLRScheduler", "LambConfig",
           "LinearWarmupLRScheduler", "PolyWarmupLRScheduler", "SGDConfig", "_LRScheduler", "_OptimizerConfig",
           *_optimizers]
