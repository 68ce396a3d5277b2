"""accelerate: `wrap_accelerator(accelerator)` makes `prepare` wrap each model with ORTModule. Called by users and by
wrap_trainer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from onnxtrain.ortmodule import DebugOptions, ORTModule

if TYPE_CHECKING:
    from accelerate import Accelerator

# Types of distributed training in which accelerate shards the parameters itself, and does not call prepare_model.
_SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
Outputs = str | int | Sequence[str | int] | None


def wrap_accelerator(accelerator: Accelerator, debug_options: DebugOptions | None = None,
                     outputs: str | int | Sequence[str | int] | None = None) -> Accelerator:
    """Makes `accelerator.prepare` wrap each torch.nn.Module with ORTModule, below mixed precision and
    DistributedDataParallel.

    `accelerator.unwrap_model` returns the module without the wrapper. A model that is an ORTModule stays as it is.

    Args:
        accelerator: an accelerate.Accelerator; this very object is changed.
        debug_options: for each ORTModule.
        outputs: for each ORTModule: which results the script reads in training.

    Returns:
        The accelerator.

    Raises:
        ValueError: the accelerator shards parameters by DeepSpeed, FSDP or Megatron-LM. Give `prepare` an
            ORTModule(model) then, as docs/ecosystem.md describes.
    """
    return wrap_with(accelerator, debug_options, lambda: outputs)


def wrap_with(accelerator: Accelerator, debug_options: DebugOptions | None,
              outputs: Callable[[], Outputs]) -> Accelerator:
    """wrap_accelerator(), which asks for the outputs when it wraps a model."""
    kind = accelerator.distributed_type.value
    if kind in _SHARDED:
        raise ValueError(f"wrap_accelerator does not support an accelerator whose distributed_type is {kind}: wrap the "
                         "model with ORTModule before accelerator.prepare")
    if "_onnxtrain_wrappers" in vars(accelerator):
        return accelerator
    # By id of the module, which its wrapper keeps alive: a model that is prepared again is not exported again.
    wrappers: weakref.WeakValueDictionary[int, ORTModule] = weakref.WeakValueDictionary()
    prepare_model, unwrap_model = accelerator.prepare_model, accelerator.unwrap_model

    def prepare_wrapped(model: torch.nn.Module, *args: object, **kwargs: object) -> torch.nn.Module:
        if not isinstance(model, ORTModule):
            wrapper = wrappers.get(id(model))
            if wrapper is None:
                wrapper = wrappers[id(model)] = ORTModule(model, debug_options, outputs=outputs())
            model = wrapper
        return prepare_model(model, *args, **kwargs)

    def unwrap(model: torch.nn.Module, *args: object, **kwargs: object) -> torch.nn.Module:
        model = unwrap_model(model, *args, **kwargs)
        return model.module if isinstance(model, ORTModule) else model

    vars(accelerator).update(prepare_model=prepare_wrapped, unwrap_model=unwrap, _onnxtrain_wrappers=wrappers)
    return accelerator
