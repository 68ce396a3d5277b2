"""Loss scaling for float16."""

from onnxtrain.training.amp.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
