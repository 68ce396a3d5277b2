"""A training step as one call of the core: forward, backward, gradients into ``.grad``, the collectives of several
processes, clipping and update.

Autograd stands between forward and backward because Python may do anything there. In a trainer's step it does nothing:
once a step has shown that the loss is an output of one graph whose gradients go to the trained weights alone, later
steps of that graph are `Session.step()`. Called by _trainer_step.py and, where the module calls its graph, by
onnxtrain/ortmodule/_program.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onnxtrain.optim._in_backward import not_alone
from onnxtrain.ortmodule._program import Program, is_node
from onnxtrain.training._reducer import Delivery, Reducer

if TYPE_CHECKING:
    from onnxtrain.optim._base import UpdateCall

MOST_SHAPES = 1024  # of inputs that are remembered


@dataclass(frozen=True)
class Learned:
    """What a program's step by autograd has shown.

    Args:
        steps: whose program it is.
        mask: a byte for each input of the graph, whether it has a gradient.
        loss: which output is the loss; like: a tensor of its dtype and shape.
    """

    steps: WholeStep
    mask: bytes
    loss: int
    like: Tensor


class WholeStep:
    """The whole steps of one model.

    Args:
        weights: those that are trained.
        gradient: of a loss like this tensor, with this scale.
        update: makes the update by one call of the function that it is given, to which it passes a callable and its
            arguments; returns whether the weights have been updated.
        reduce: with several processes joins their gradients before the update; else None.
        reducer: where gradients go that are reduced while backward runs.

    Attributes:
        loss: of the latest call, where it was a whole step; else None.
        done: whether that step has updated the weights; None where no update was to follow.
    """

    def __init__(self, weights: Collection[Tensor], gradient: Callable[[Tensor, float], Tensor],
                 update: Callable[[Callable[[UpdateCall], float | None]], bool], reduce: Callable[[], None] | None,
                 reducer: Reducer | None) -> None:
        self._weights, self._gradient, self._update = weights, gradient, update
        self._reduce, self._reducer = reduce, reducer
        self._shapes: set[tuple[torch.Size | type, ...]] = set()  # of inputs whose outputs are as they should
        self._now: tuple[torch.Size | type, ...] = ()
        self._offer: tuple[float, bool] | None = None
        self.loss: Tensor | None = None
        self.done: bool | None = None

    def begin(self, given: Sequence[object], scale: float, last: bool) -> None:
        """Before the model is called.

        Args:
            given: its inputs.
            scale: the gradient of the loss.
            last: whether an update follows.
        """
        self.loss = self.done = None
        self._now = tuple([value.shape if isinstance(value, Tensor) else type(value) for value in given])
        # DistributedDataParallel and Horovod join gradients by hooks that cannot be seen here.
        unseen = self._reduce is None and not_alone()
        free = self._now in self._shapes and not unseen and not _has_hooks(self._weights)
        self._offer = (scale, last) if free else None

    def end(self) -> None:
        """After that call: a further call of the model is none of this step's."""
        self._offer = None

    def run(self, program: Program, tensors: tuple[Tensor, ...], mask: bytes) -> tuple[Tensor, ...] | None:
        """A program's outputs, of a whole step; None where autograd has to see this call."""
        learned = program.whole_step
        if self._offer is None or learned.mask != mask:
            return None
        (scale, last), self._offer = self._offer, None
        outputs: tuple[Tensor, ...] = ()
        delivery: Delivery | tuple[None, None] = None, None
        if self._reducer is not None and (targets := self._reducer.targets(tensors, mask)) is not None:
            mask, delivery = self._reducer.mask(mask, targets), self._reducer.delivery(targets, True)

        def step(update: UpdateCall | None) -> float | None:
            nonlocal outputs
            outputs, result = program.session.step(tensors, mask, program.seed() if program.random else 0, learned.loss,
                                                   self._gradient(learned.like, scale), update, *delivery, self._reduce)
            return result

        if last:
            self.done = self._update(step)
        else:
            step(None)
        self.loss = outputs[learned.loss]
        return outputs

    def learn(self, loss: Tensor) -> None:
        """Before the backward of a step by autograd, whose outputs are as they should: notes whether steps with inputs
        of these shapes can be whole.
        """
        node: Any = loss.grad_fn
        if not is_node(node, self._reducer) or not isinstance(node.program, Program):  # one of several segments
            return
        program, run = node.program, node.run
        wanted = [source.kind for source, wants in zip(program.exported.inputs, program.latest_mask) if wants]
        gradients = [loss if place == loss.output_nr else None for place in range(len(run.differentiable))]
        places: Sequence[int] = range(len(program.latest_mask))  # in place of gradients of the inputs
        reached = program.reach.drop(run.differentiable, gradients, places)
        if program.may_step and set(wanted) == {"parameter"} and not any(
                wants and place is None for wants, place in zip(program.latest_mask, reached)):
            if program.whole_step is None or program.whole_step.mask != program.latest_mask:
                program.whole_step = Learned(self, program.latest_mask, loss.output_nr, torch.empty_like(loss.detach()))
            if len(self._shapes) == MOST_SHAPES:
                self._shapes.clear()
            self._shapes.add(self._now)


def _has_hooks(weights: Iterable[Tensor]) -> bool:
    """Whether a function waits for the gradient of one of these."""
    return any([weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None) for weight in weights])
