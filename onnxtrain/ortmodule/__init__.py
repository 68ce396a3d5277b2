"""ORTModule: a torch.nn.Module whose forward and backward run in onnxtrain's engine."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from onnxtrain import _torch
from onnxtrain.ortmodule._debug import DebugOptions, LogLevel
from onnxtrain.ortmodule._fallback import FallbackPolicy, ORTModuleTorchModelException
from onnxtrain.ortmodule._module import ORTModule
from onnxtrain.ortmodule.graph_optimizer_registry import register_graph_optimizer

__all__ = ["DebugOptions", "FallbackPolicy", "LogLevel", "ORTModule", "ORTModuleTorchModelException",
           "register_graph_optimizer"]

_torch.check()
ONNX_OPSET_VERSION = 20
MINIMUM_RUNTIME_PYTORCH_VERSION_STR = "2.10"
ORTMODULE_TORCH_CPP_DIR = ""  # nothing is compiled at install
ORTMODULE_FALLBACK_POLICY = FallbackPolicy.default()
ORTMODULE_FALLBACK_RETRY = False


def _are_deterministic_algorithms_enabled() -> bool:
    """Every kernel of the engine gives the same result each time; this is what the user asked of torch."""
    return torch.are_deterministic_algorithms_enabled()


def _defined_from_envvar(name: str, default: Any, warn: bool = True) -> Any:
    """A variable of the environment, as the type of `default`; the default, with a warning, where it is none."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return type(default)(text)
    except (TypeError, ValueError) as error:
        if warn:
            warnings.warn(f"Unable to overwrite constant {name!r} with value {text!r} due to {error}.", stacklevel=2)
        return default
