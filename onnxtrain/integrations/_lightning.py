"""lightning: `OnnxtrainCallback` wraps the networks of a LightningModule with ORTModule, where a Trainer sets it up."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from onnxtrain.ortmodule import DebugOptions, ORTModule

# Either package: they call the same hooks.
_name = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
_Callback: Any = importlib.import_module(_name).Callback


class OnnxtrainCallback(_Callback):  # type: ignore[misc]
    """Wraps submodules of a LightningModule with ORTModule before its optimizers are configured.

    lightning.Trainer(callbacks=[OnnxtrainCallback()]) is enough for a task of one network. Keys of checkpoints do not
    change, so that a task loads them with and without this callback.

    Args:
        names: submodules, such as "net" or "gan.generator", that `__init__` of the task makes; without one, all
            children that have parameters and a forward.
        debug_options: for each ORTModule.

    Raises:
        ValueError: in setup: the task has no such submodule, or no child to wrap. Lightning calls setup before
            configure_model: wrap in configure_model what that one makes.
    """

    def __init__(self, *names: str, debug_options: DebugOptions | None = None) -> None:
        super().__init__()
        self.names = names
        self._debug_options = debug_options

    def setup(self, trainer: object, pl_module: torch.nn.Module, stage: str) -> None:
        """Lightning calls this at the start of fit, validate, test and predict."""
        task = type(pl_module).__name__
        names = self.names or [name for name, child in pl_module.named_children() if _can_run(child)]
        if not names:
            raise ValueError(f"OnnxtrainCallback: no child of {task} has parameters and a forward; name the submodules "
                             "to wrap")
        for name in names:
            try:
                child = pl_module.get_submodule(name)
            except AttributeError as error:
                raise ValueError(f"OnnxtrainCallback: {task} has no submodule {name!r} at setup") from error
            if not isinstance(child, ORTModule):
                parent, _, attribute = name.rpartition(".")
                setattr(pl_module.get_submodule(parent), attribute, ORTModule(child, self._debug_options))


def _can_run(child: torch.nn.Module) -> bool:
    """Whether a child computes something that is trained: no container without a forward, no metric, no loss."""
    return type(child).forward is not torch.nn.Module.forward and next(child.parameters(), None) is not None
