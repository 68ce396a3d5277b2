"""HierarchicalORTModule, for scripts that import it: ORTModule itself runs in the engine what it can of a module."""

from onnxtrain.ortmodule._module import ORTModule as HierarchicalORTModule

__all__ = ["HierarchicalORTModule"]
