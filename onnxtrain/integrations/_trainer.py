"""transformers: `wrap_trainer(trainer)` makes a Trainer run its model with ORTModule and FusedAdam.

Trainer keeps two models: `model`, which it saves, and `model_wrapped`, which it trains. The first stays the user's
module, so that checkpoints, label names and generation are as without this; the second becomes an ORTModule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onnxtrain.integrations._accelerate import Outputs, wrap_with
from onnxtrain.optim import AdamWMode, FusedAdam
from onnxtrain.ortmodule import DebugOptions, ORTModule

if TYPE_CHECKING:
    from transformers import Trainer


def wrap_trainer(trainer: Trainer, debug_options: DebugOptions | None = None, fused_adam: bool = True) -> Trainer:
    """Makes a transformers.Trainer, or one of a subclass, train and evaluate its model in the engine.

    `trainer.model` stays the module; after the first step `trainer.model_wrapped` is the ORTModule, or the
    DistributedDataParallel around it. Where Trainer's own code alone reads a training step's results, the loss alone is
    computed (``ORTModule(outputs=)``): not if a subclass, or the trainer itself, has a compute_loss or training_step of
    its own, and not with compute_loss_func or smoothed labels.

    Args:
        trainer: this very object is changed, before `train()` or `evaluate()`.
        debug_options: for the ORTModule.
        fused_adam: FusedAdam takes the place of torch's AdamW, with the same rule, state and hyperparameters. An
            optimizer that was given to the trainer, or another `optim` of its arguments, stays.

    Returns:
        The trainer.

    Raises:
        TypeError: this is no Trainer, or its model is an ORTModule.
        ValueError: the trainer shards parameters by DeepSpeed or FSDP.
    """
    if not hasattr(trainer, "model"):
        raise TypeError(f"wrap_trainer() takes a transformers.Trainer, but was given a {type(trainer).__name__}")
    if isinstance(trainer.model, ORTModule):
        raise TypeError("wrap_trainer: the trainer's model is an ORTModule; give the trainer the module itself")
    accelerator = wrap_with(trainer.accelerator, debug_options, lambda: _outputs_of(trainer))
    wrap_model = trainer._wrap_model

    def wrap_or_reuse(model: torch.nn.Module, training: bool = True, dataloader: object = None) -> torch.nn.Module:
        """What trains or evaluates: an evaluation gets the ORTModule that trains, once there is one."""
        if training and isinstance(model, ORTModule):
            model = model.module  # of an evaluation before the training, which prepares it again
        model = wrap_model(model, training, dataloader)
        return model if training else vars(accelerator)["_onnxtrain_wrappers"].get(id(model), model)

    vars(trainer)["_wrap_model"] = wrap_or_reuse
    if fused_adam and _uses_torch_adamw(trainer):
        arguments = trainer.args
        trainer.optimizer_cls_and_kwargs = FusedAdam, {
            "lr": arguments.learning_rate, "betas": (arguments.adam_beta1, arguments.adam_beta2),
            "eps": arguments.adam_epsilon, "adam_w_mode": AdamWMode.ADAMW_TORCH}
    return trainer


def _outputs_of(trainer: Trainer) -> Outputs:
    """The loss where Trainer's own code alone reads what the model returns in training; else what the user says."""
    from transformers import Trainer

    own = all(getattr(type(trainer), name) is getattr(Trainer, name) and name not in vars(trainer)
              for name in ("compute_loss", "training_step"))
    others = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    if not own or others or getattr(trainer.args, "past_index", -1) >= 0:
        return None
    return "loss", 0  # as compute_loss() finds it in a dict, and in all else


def _uses_torch_adamw(trainer: Trainer) -> bool:
    """Whether Trainer would make a torch.optim.AdamW that FusedAdam can replace."""
    name = getattr(trainer.args.optim, "value", trainer.args.optim)
    chosen = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    dtypes = {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}
    return (not chosen and name in ("adamw_torch", "adamw_torch_fused") and not trainer.args.optim_args
            and dtypes <= {torch.float32, torch.float64, torch.bfloat16, torch.float16})
