"""The two modes of a module, by the name that scripts import."""

from onnxtrain.ortmodule._managers import TorchModule

GraphExecutionManagerFactory = TorchModule.Managers
