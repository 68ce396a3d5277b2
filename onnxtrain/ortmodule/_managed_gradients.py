"""Parameters that autograd does not see: one node takes the engine's gradients and puts them into `.grad` itself.

Autograd's own way costs 3 to 4 microseconds for each parameter of a step, a node for each. With
ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT=1 the parameters belong to one node with an anchor, a tensor of no elements,
whatever their number. The price: they are not in the graph, so torch.autograd.grad(loss, parameters) finds nothing, and
backward(inputs=...) gives them nothing. Called by _program.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain._torch import foreach_add_, will_engine_execute_node
from onnxtrain.optim._in_backward import not_alone


class Held:
    """What one program's steps need: the anchor, and how to run backward.

    Args:
        forward: (ctx, program, mask, leaves, *tensors) -> outputs; saves on ctx what `gradients` wants.
        gradients: (ctx, gradients of the outputs) -> one per input of the graph, or None.
        inputs: for each input of the graph, whether autograd has to see it: those of the user's call.
    """

    def __init__(self, forward: Callable[..., object],
                 gradients: Callable[[Any, tuple[Tensor | None, ...]], Sequence[Tensor | None]],
                 inputs: Sequence[bool]) -> None:
        self.forward, self.gradients = forward, gradients
        self.seen = [index for index, seen in enumerate(inputs) if seen]
        self.hidden = [index for index, seen in enumerate(inputs) if not seen]
        self.anchor = torch.empty(0, requires_grad=True)
        self.node = torch.autograd.graph.get_gradient_edge(self.anchor).node

    def apply(self, program: Any, mask: bytes, leaves: object, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """One forward; None where a parameter is not a leaf, or others watch how gradients are accumulated."""
        if not_alone() or False in [tensors[index].is_leaf for index in self.hidden]:
            return None
        seen = [tensors[index] for index in self.seen]
        return HeldFunction.apply(self, program, mask, leaves, tensors, self.anchor, *seen)


class HeldFunction(torch.autograd.Function):
    """As _ORTModuleFunction, with the anchor and the inputs of the user's call as its inputs."""

    @staticmethod
    def forward(ctx: Any, held: Held, program: Any, mask: bytes, leaves: object, tensors: Sequence[Tensor],
                anchor: Tensor, *seen: Tensor) -> object:
        ctx.held = held
        ctx.weights = [tensors[index] if mask[index] else None for index in held.hidden]
        return held.forward(ctx, program, mask, leaves, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("backward(create_graph=True) needs the parameters in autograd's graph: unset "
                               "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT")
        held = ctx.held
        found = list(held.gradients(ctx, grads))
        if will_engine_execute_node(held.node):  # not under torch.autograd.grad or backward(inputs=...)
            _accumulate(ctx.weights, [found[index] for index in held.hidden])
        return (None, None, None, None, None, None, *[found[index] for index in held.seen])


def _accumulate(weights: list[Tensor | None], grads: list[Tensor | None]) -> None:
    """As autograd's AccumulateGrad for each, tensor hooks and post-accumulate hooks included. `grads` is used up."""
    sums: list[Tensor] = []
    more: list[Tensor] = []
    waiting: list[Tensor] = []
    for index, weight in enumerate(weights):
        grad, grads[index] = grads[index], None
        if weight is None or grad is None:
            continue
        if weight._backward_hooks:
            for hook in tuple(weight._backward_hooks.values()):
                changed = hook(grad)
                grad = grad if changed is None else changed
        if (old := weight.grad) is None:
            weight.grad = grad
        else:
            sums.append(old)
            more.append(grad)
        if weight._post_accumulate_grad_hooks:
            waiting.append(weight)
    if sums:
        foreach_add_(sums, more)
    for weight in waiting:
        for hook in tuple(weight._post_accumulate_grad_hooks.values()):
            hook(weight)
