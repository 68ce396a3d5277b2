"""Looking at activations and their gradients while a module trains: subscribers, called for every module's outputs."""

from onnxtrain.utils.hooks._statistics import StatisticsSubscriber
from onnxtrain.utils.hooks._subscribers import (
    GlobalSubscriberManager,
    SubscriberBase,
    SubscriberManager,
    inspect_activation,
)

__all__ = ["GlobalSubscriberManager", "StatisticsSubscriber", "SubscriberBase", "SubscriberManager",
           "inspect_activation"]
