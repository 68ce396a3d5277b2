"""Subscribers of a module's activations: forward hooks that pass each output through a torch.autograd.Function.

In a module wrapped by ORTModule those functions are nodes of the graph, so subscribers are called at every step there
as well; subscribe before wrapping. What a subscriber does with a tensor is its own business, see _statistics.py.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain._export import autograd_functions
from onnxtrain._torch import pytree


class SubscriberBase:
    """Sees activations and their gradients of the steps from start_step to end_step, the latter left out.

    Args:
        start_step: None: from the first.
        end_step: None: to the last.
    """

    def __init__(self, start_step: int | None = None, end_step: int | None = None) -> None:
        self.start_step, self.end_step = start_step, end_step

    def wants(self, step: int) -> bool:
        """Whether it is called in a step."""
        return (self.start_step is None or step >= self.start_step) and (self.end_step is None or step < self.end_step)

    def forward_activation(self, name: str, tensor: Tensor, step: int) -> None:
        """An output of a module, of any shape and dtype, or what was given to inspect_activation();
        not to be changed.
        """

    def backward_activation(self, name: str, gradient: Tensor, step: int) -> None:
        """The gradient that arrives at it, with its shape and dtype; not to be changed."""


@dataclasses.dataclass(eq=False)
class _Subscription:
    """One subscribed module; its first call is step 0."""

    subscribers: Sequence[SubscriberBase]
    step: int = 0
    handles: list[torch.utils.hooks.RemovableHandle] = dataclasses.field(default_factory=list)


class _Tap(torch.autograd.Function):
    """The identity, shown to the subscribers on both ways."""

    @staticmethod
    def forward(ctx: Any, subscription: _Subscription, name: str, tensor: Tensor) -> Tensor:
        ctx.subscription, ctx.name, ctx.step = subscription, name, subscription.step
        if not autograd_functions.inside():  # an export asks for the shape only
            for subscriber in subscription.subscribers:
                if subscriber.wants(subscription.step):
                    subscriber.forward_activation(name, tensor.detach(), subscription.step)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        for subscriber in ctx.subscription.subscribers:
            if subscriber.wants(ctx.step):
                subscriber.backward_activation(ctx.name, gradient.detach(), ctx.step)
        return None, None, gradient


class _EndOfStep(torch.autograd.Function):
    """The identity of all outputs of the subscribed module; what is computed after it belongs to the next step."""

    @staticmethod
    def forward(ctx: object, subscription: _Subscription, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not autograd_functions.inside():
            subscription.step += 1
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients


class _Running(threading.local):
    """The subscription whose module's forward is under way in this thread."""

    subscription: _Subscription | None = None


_running = _Running()


def _mapped(result: object, function: Callable[[int, Tensor], Tensor]) -> object:
    """The result with function(index, tensor) in place of each of its tensors."""
    leaves, spec = pytree.tree_flatten(result)
    found = 0
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[place] = function(found, leaf)
            found += 1
    return pytree.tree_unflatten(leaves, spec)


class SubscriberManager:
    """Calls subscribers for the outputs of a module and of every module in it.

    An activation's name is `{class}_{number of the module, in the order of Module.modules()}_{index}th_output`.
    """

    def __init__(self) -> None:
        self._subscription: _Subscription | None = None

    def subscribe(self, module: torch.nn.Module, subscribers: Sequence[SubscriberBase]) -> None:
        """From now on, until the next subscribe(); the module's next call is step 0.

        Raises:
            TypeError: module is no torch.nn.Module, or a subscriber no SubscriberBase.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"subscribe() takes a torch.nn.Module, not {type(module).__name__}")
        for subscriber in subscribers:
            if not isinstance(subscriber, SubscriberBase):
                raise TypeError(f"{subscriber!r} is not a SubscriberBase")
        self.unsubscribe()
        subscription = self._subscription = _Subscription(tuple(subscribers))
        for number, child in enumerate(module.modules()):
            hook = self._hook(subscription, f"{type(child).__name__}_{number}")
            subscription.handles.append(child.register_forward_hook(hook))

        def begin(_module: torch.nn.Module, _arguments: object) -> None:
            _running.subscription = subscription

        def end(_module: torch.nn.Module, _arguments: object, result: object) -> object:
            _running.subscription = None
            leaves, spec = pytree.tree_flatten(result)
            where = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            if where:
                passed = _EndOfStep.apply(subscription, *(leaves[place] for place in where))
                for place, leaf in zip(where, passed):
                    leaves[place] = leaf
            return pytree.tree_unflatten(leaves, spec)

        subscription.handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def unsubscribe(self) -> None:
        """Takes the hooks off again."""
        if self._subscription is not None:
            for handle in self._subscription.handles:
                handle.remove()
            if _running.subscription is self._subscription:  # a forward that raised has not come to its end
                _running.subscription = None
            self._subscription = None

    @staticmethod
    def _hook(subscription: _Subscription, name: str) -> Callable[[torch.nn.Module, object, object], object]:
        def show(_module: torch.nn.Module, _arguments: object, result: object) -> object:
            return _mapped(result, lambda index, tensor: _Tap.apply(subscription, f"{name}_{index}th_output", tensor))

        return show


GlobalSubscriberManager = SubscriberManager()


def inspect_activation(activation_name: str, tensor: Tensor) -> Tensor:
    """Shows a tensor of any shape and dtype to the subscribers of the module whose forward is running; returns it.

    Outside of a subscribed module it is the identity.

    Raises:
        TypeError: tensor is no Tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"inspect_activation({activation_name!r}) was given a {type(tensor).__name__}, expected a "
                        "Tensor")
    subscription = _running.subscription
    return tensor if subscription is None else _Tap.apply(subscription, activation_name, tensor)
