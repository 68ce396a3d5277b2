"""Optimizers with one pass over memory: drop-in for torch.optim's, and for onnxruntime.training.optim."""

from onnxtrain.optim._adam import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FusedAdam"]
