"""ORTModule: a torch.nn.Module whose forward and backward run in onnxtrain's engine."""

from __future__ import annotations

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
