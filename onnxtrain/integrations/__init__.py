"""One line for a training script of another library: its models run in ORTModule from then on.

None of the libraries is imported before one of its names is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtrain.integrations._accelerate import wrap_accelerator
from onnxtrain.integrations._trainer import wrap_trainer

if TYPE_CHECKING:
    from onnxtrain.integrations._lightning import OnnxtrainCallback

__all__ = ["OnnxtrainCallback", "wrap_accelerator", "wrap_trainer"]


def __getattr__(name: str) -> type[OnnxtrainCallback]:
    if name == "OnnxtrainCallback":  # a subclass of lightning's Callback
        from onnxtrain.integrations._lightning import OnnxtrainCallback

        return OnnxtrainCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
