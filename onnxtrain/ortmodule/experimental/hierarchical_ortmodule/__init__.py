"""A module whose exportable parts run in the engine, where the whole cannot."""

from onnxtrain.ortmodule.experimental.hierarchical_ortmodule._hierarchical_ortmodule import HierarchicalORTModule

__all__ = ["HierarchicalORTModule"]
