"""Data parallel: sums of all processes' gradients, in buckets that are reduced while backward still runs.

Used by _trainer_step.py. A gradient lies in a bucket, of which ``.grad`` is a view; the engine writes it there as soon
as it is final (_C.Run.deliver), and a bucket whose gradients are all there is reduced meanwhile. The idea is that of
torch.nn.parallel.DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020). Every process reduces the same
buckets in the same order, whatever order its backward has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from onnxtrain.optim._in_backward import EngineNode, StepInBackward
from onnxtrain.training._distributed import Peers, buckets

Delivery = tuple[list[tuple[int, Tensor, bool]], Callable[[int], None]]  # see Reducer.delivery()
_ADDED = (torch.float32, torch.float64)  # dtypes that the engine can add to a gradient


def _is_plain(weight: Tensor) -> bool:
    """Whether the engine may write this weight's gradient, or add to it, without autograd."""
    return (weight.dtype in _ADDED and weight.is_contiguous() and not weight._backward_hooks
            and not getattr(weight, "_post_accumulate_grad_hooks", None)
            and getattr(weight, "grad_dtype", None) in (None, weight.dtype))


class _Bucket:
    """Memory of several gradients; `waits`: how many of them have still to come before it is reduced."""

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        self.flat = torch.zeros(sum(weight.numel() for weight in weights), dtype=weights[0].dtype,
                                device=weights[0].device)
        self.gradients = [part.view(weight.shape) for weight, part in
                          zip(weights, self.flat.split([weight.numel() for weight in weights]))]
        self.waits = 0
        self.finish: Callable[[], None] | None = None


class Reducer:
    """Gradients of some weights. ORTModule._join() takes it, as it takes a StepInBackward.

    Args:
        weights: those that are trained, in an order that all processes share.
        peers: the processes.

    Attributes:
        early: buckets whose reduction began during the latest backward.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], peers: Peers) -> None:
        self._peers = peers
        self._weights = list(weights)
        self._buckets: list[_Bucket] = []
        self._of: dict[int, tuple[_Bucket, Tensor]] = {}  # by id of a weight: where its gradient lies
        self._next = 0  # the next bucket to be reduced
        self._calls = 0  # of the engine in this forward
        self._last = False
        self._node: object = None  # whose gradients may be reduced early
        self.early = 0

    def _make(self) -> None:
        """Backward begins with the last weights, and so do the buckets."""
        for group in buckets(self._weights[::-1]):
            bucket = _Bucket(group)
            self._buckets.append(bucket)
            self._of.update((id(weight), (bucket, gradient)) for weight, gradient in zip(group, bucket.gradients))

    # ---- what ORTModule calls ----

    def begin(self, last: bool) -> None:
        """Before forward. last: whether the update follows this backward."""
        if not self._of:
            self._make()
        self._calls, self._last, self._node, self.early, self._next = 0, last, None, 0, 0
        for bucket in self._buckets:
            bucket.waits, bucket.finish = len(bucket.gradients), None

    def targets(self, tensors: Sequence[Tensor], flags: bytes) -> dict[int, Tensor] | None:
        """The inputs of a call whose gradients the engine writes into buckets: index to weight. None: there are none.

        A weight that is two inputs has the sum of two gradients, and hooks want to see a gradient: these are left to
        autograd.
        """
        self._calls += 1
        count = Counter(map(id, tensors))
        return {i: tensor for i, (tensor, flag) in enumerate(zip(tensors, flags))
                if flag and id(tensor) in self._of and count[id(tensor)] == 1 and _is_plain(tensor)} or None

    on_devices = False  # the engine writes buckets in memory of the CPU
    mask = staticmethod(StepInBackward.mask)

    def gradients(self, ctx: EngineNode[Tensor], grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        """The engine's backward of a node; None for the gradients that lie in buckets."""
        reached: Sequence[int | None] = range(len(ctx.next_functions))
        if len(grads) > 1:  # a weight behind another output than the loss has no gradient, not zeros
            reached = ctx.program.reach.drop(ctx.run.differentiable, grads, reached)
        targets = {i: weight for i, weight in ctx.targets.items() if reached[i] is not None}
        found = ctx.run.deliver(ctx.saved_tensors, grads, *self.delivery(targets, ctx is self._node))
        return found if len(grads) == 1 else ctx.program.reach.drop(ctx.run.differentiable, grads, found)

    def delivery(self, targets: Mapping[int, Tensor], only: bool) -> Delivery:
        """The receivers of a backward, and what is told that a gradient is there, for Run.deliver().

        Args:
            targets: of those inputs that have a gradient, see targets().
            only: these gradients come from no other call, so that they are final after the last backward.
        """
        early = only and self._last
        return ([(i, *self._place(weight)) for i, weight in targets.items()],
                lambda index: self._note(targets[index], early))

    def _place(self, weight: Tensor) -> tuple[Tensor, bool]:
        """Where a weight's gradient lies, and whether there is one already that the next one is added to."""
        _, gradient = self._of[id(weight)]
        if weight.grad is None:
            return gradient, False
        if weight.grad is not gradient:
            gradient.copy_(weight.grad)
            weight.grad = gradient
        return gradient, True

    def _note(self, weight: Tensor, early: bool) -> None:
        """A gradient of this backward is in its bucket; early: it is final, and the bucket may be reduced."""
        bucket, gradient = self._of[id(weight)]
        weight.grad = gradient
        bucket.waits -= 1
        while early and self._next < len(self._buckets) and self._buckets[self._next].waits == 0:
            self._start()
            self.early += 1

    # ---- reduction ----

    def backward(self, loss: Tensor) -> None:
        """Before the backward of this loss: gradients may be reduced early where they come from one call of the engine
        alone, and from nothing between the weights and it.
        """
        node = loss.grad_fn
        after = [] if node is None else [function for function, _ in node.next_functions if function is not None]
        leaves = all(getattr(function, "variable", None) is not None for function in after)
        self._node = node if self._calls == 1 and leaves else None

    def _start(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.finish = self._peers.start_sum(bucket.flat)

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward before an update: every ``.grad`` is the sum of all processes'. A weight that has no
        gradient in any process gets none.
        """
        mine = [weight.grad is not None for weight in self._weights]
        for weight in self._weights:
            _, gradient = self._of[id(weight)]
            if weight.grad is None:
                gradient.zero_()
            elif weight.grad is not gradient:
                gradient.copy_(weight.grad)
        while self._next < len(self._buckets):
            self._start()
        for bucket in self._buckets:
            assert bucket.finish is not None
            bucket.finish()
        for weight, there in zip(self._weights, self._peers.any_of(mine, self._weights)):
            weight.grad = self._of[id(weight)][1] if there else None
