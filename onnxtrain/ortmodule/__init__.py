"""ORTModule: a torch.nn.Module whose forward and backward run in onnxtrain's engine."""

from onnxtrain.ortmodule._debug import DebugOptions, LogLevel
from onnxtrain.ortmodule._fallback import FallbackPolicy, ORTModuleTorchModelException
from onnxtrain.ortmodule._module import ORTModule

__all__ = ["DebugOptions", "FallbackPolicy", "LogLevel", "ORTModule", "ORTModuleTorchModelException"]
