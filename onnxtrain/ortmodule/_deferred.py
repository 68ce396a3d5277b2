"""Scores whose only reader is a loss outside the module are computed with that loss, as if it stood in the module.

A graph that returns large scores and no loss is watched until STEPS training steps in a row took the scores into one
torch.nn.functional.cross_entropy, through views and copies alone, and kept no reference to them when backward began.
From then on a call of the module returns DeferredScores: a tensor that knows its shape and is computed when it is read.
Where cross_entropy gets it, one graph runs, the module's with the loss behind it, whose labels are one more argument:
scores are not stored, and rows without a label and padding are not computed. Everything else that reads the scores has
them from the module's own graph, of the same arguments and random numbers. Where that happens often, each call computes
them again.

Called by dynamo.py for the graphs of an ORTModule, and by _outside_loss.py for the losses that are watched.
ONNXTRAIN_DISABLE=outside_loss, or =unread, leaves it out.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from onnxtrain import options
from onnxtrain.ortmodule import _random
from onnxtrain.ortmodule._key import function_mode, torch_modes
from onnxtrain.ortmodule._outside_loss import LEAST_ELEMENTS, WATCHED, saved_by_hooks
from onnxtrain.ortmodule._unread import STEPS, Pending, Reads, UnreadResult, is_close, is_loss, refuse_gradient, watch

MISSES = 4  # watched steps that read scores otherwise, before the watching ends
MAX_JOINED = 4  # graphs with a loss, of other settings each
_MARK = 7919  # stride of the axis of classes in a tensor without memory, by which it is found again
_VIEWS = frozenset((  # nodes of autograd between the module's and the loss
    "AliasBackward0", "CloneBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "SelectBackward0",
    "SliceBackward0", "SqueezeBackward0", "SqueezeBackward1", "ToCopyBackward0", "TransposeBackward0",
    "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0"))
_RESHAPES = frozenset((Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, torch.reshape, torch.flatten,
                       torch.unflatten))
_MOVES = frozenset((Tensor.__getitem__, Tensor.transpose, Tensor.permute, Tensor.squeeze, Tensor.unsqueeze,
                    torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze))
_COPIES = frozenset((Tensor.contiguous, Tensor.float, Tensor.to, Tensor.cpu))
_HERE = {Tensor.cpu: ((),), Tensor.to: (("cpu",), (torch.device("cpu"),))}  # arguments that leave a tensor where it is
_KNOWN = frozenset(getattr(Tensor, name).__get__ for name in (
    "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_cpu", "is_sparse", "is_nested",
    "is_quantized", "is_meta")) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size,
                                   Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex}
_OF_AUTOGRAD = frozenset(getattr(Tensor, name).__get__ for name in (
    "grad", "grad_fn", "retains_grad", "output_nr", "_backward_hooks")) | {
        Tensor.register_hook, Tensor.retain_grad, Tensor.backward, torch.autograd.grad, torch.autograd.backward}
_PLAIN = (int, str, slice, type(None), type(...), torch.dtype, torch.device)
_log = logging.getLogger("onnxtrain")


class DeferredScores(UnreadResult):
    """Stands for scores, or for a view or copy of them with whole rows. What it knows of itself, such as its shape, is
    no reading.

    Attributes, whose names are none of Tensor's:
        _rows: of the scores, by number, where this tensor has them: int64 of the same shape, but for one class. None
            for all in their order.
        _axis: that of the classes.
        _widened: whether 16-bit scores were made float32 on the way.
    """

    _pending: PendingScores
    _made_by: tuple[DeferredScores, Any, Any, Any] | None
    _value: Tensor | None
    _rows: Tensor | None
    _axis: int
    _widened: bool

    @staticmethod
    def _like(shape: Tensor, pending: PendingScores, made_by: tuple[DeferredScores, Any, Any, Any] | None = None,
             rows: Tensor | None = None, axis: int = -1) -> DeferredScores:
        """One of the shape, strides and dtype of a tensor without memory."""
        with torch._C.DisableTorchFunctionSubclass():
            made: DeferredScores = Tensor._make_wrapper_subclass(
                DeferredScores, shape.shape, strides=shape.stride(), dtype=shape.dtype,
                device=torch.device("cpu"), requires_grad=True)
            made.register_hook(refuse_gradient)
        made._pending, made._made_by, made._value = pending, made_by, None
        made._rows, made._axis = rows, axis % shape.dim()
        made._widened = made_by is not None and (made_by[0]._widened or made_by[0].dtype is not shape.dtype)
        pending.keep(made)
        return made

    def computed(self) -> Tensor:
        """The tensor for which this one stands."""
        self._pending.results()
        assert self._value is not None
        return self._value

    def _take(self, scores: Tensor) -> None:
        """Computes this one; those that it was made of are computed before."""
        if self._made_by is None:
            self._value = scores
        else:
            source, function, args, kwargs = self._made_by
            assert source._value is not None
            self._value = function(source._value, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredScores):
            if function in _KNOWN:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **kwargs)
            made = None
            if first._pending.is_open and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                if function is F.cross_entropy:
                    made = _loss(*args, **kwargs)
                elif function in _RESHAPES | _MOVES | _COPIES and _has_numbers_alone(args[1:], kwargs):
                    made = first._follow(function, args[1:], kwargs)
            if made is not None:
                return made
        if function in _OF_AUTOGRAD:
            pytree.tree_map_only(DeferredScores, DeferredScores._refuse_if_joined, (args, kwargs))
        args, kwargs = pytree.tree_map_only(UnreadResult, lambda result: result.computed(), (args, kwargs))
        return function(*args, **kwargs)

    def _refuse_if_joined(self) -> DeferredScores:
        if self._pending.joined:
            raise RuntimeError(
                "code asks for the gradient or the grad_fn of an ORTModule's scores after their loss was computed. The "
                f"engine computed the loss without storing them, because no other code had read them in {STEPS} steps. "
                "Ask before the loss is computed, or set ONNXTRAIN_DISABLE=outside_loss.")
        return self

    def _follow(self, function: Any, args: Any, kwargs: Any) -> DeferredScores | None:
        """A view or copy; None where it has to be computed. Raises what torch raises for such arguments."""
        with torch._C.DisableTorchFunctionSubclass():
            shape, strides, dtype = self.shape, self.stride(), self.dtype
        before = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        axis, rows = self._axis, self._rows
        if not kwargs and args in _HERE.get(function, ()):
            return self
        if function in _COPIES and (kwargs or len(args) != (function is Tensor.to) or any(
                type(arg) is not torch.dtype for arg in args)):
            return None
        after = function(before, *args, **kwargs)
        if after is before:
            return self
        if after.dim() < 1 or after.dtype is not dtype and after.dtype is not torch.float32:
            return None
        if function in _RESHAPES:
            if axis != len(shape) - 1 or after.shape[-1] != shape[-1]:
                return None
            rows, axis = None if rows is None else rows.reshape(*after.shape[:-1], 1), after.dim() - 1
        elif function in _MOVES:
            marked = torch.empty_strided(shape, [_MARK * (i == axis) for i in range(len(shape))], device="meta")
            moved = function(marked, *args, **kwargs)
            found = [i for i, kind in enumerate(zip(moved.shape, moved.stride())) if kind == (shape[axis], _MARK)]
            if len(found) != 1:
                return None
            if rows is None:
                rows = torch.arange(math.prod(shape[:-1]), device="cpu").reshape(*shape[:-1], 1)
            rows, axis = function(rows.expand(shape), *args, **kwargs).narrow(found[0], 0, 1), found[0]
        return DeferredScores._like(after, self._pending, (self, function, args, kwargs), rows, axis)

    def _labels(self, target: Tensor, ignore_index: int) -> Tensor | None:
        """The target of a loss of this tensor as labels of all rows of the scores; None where they do not fit."""
        shape = list(self.shape)
        del shape[self._axis]
        if self._axis != 1 or list(target.shape) != shape or not target.numel():
            return None
        leading = self._pending.shape[:-1]
        if self._rows is None:
            return target.reshape(leading)
        labels = target.new_full((math.prod(leading),), ignore_index)
        labels[self._rows.reshape(-1)] = target.reshape(-1)
        return labels.reshape(leading)


def _has_numbers_alone(args: Any, kwargs: Any) -> bool:
    """Whether no argument of a view is a tensor, or anything else that could change."""
    leaves = pytree.tree_leaves((args, kwargs))
    leaves += [part for leaf in leaves if type(leaf) is slice for part in (leaf.start, leaf.stop, leaf.step)]
    return all(type(leaf) in _PLAIN for leaf in leaves)


def _loss(scores: DeferredScores, target: Any, weight: Any = None, size_average: Any = None, ignore_index: Any = -100,
          reduce: Any = None, reduction: Any = "mean", label_smoothing: Any = 0.0) -> Tensor | None:
    """cross_entropy in one graph with the module; None where the scores have to be computed for it."""
    dtype, pending = scores.dtype, scores._pending
    if (type(target) is not Tensor or target.dtype is not torch.int64 or target.device.type != "cpu"
            or weight is not None or size_average is not None or reduce is not None or label_smoothing != 0.0
            or type(ignore_index) is not int or reduction not in ("mean", "sum")
            or dtype not in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")):
        return None
    labels = scores._labels(target, ignore_index)
    if labels is None or not pending.may_join():
        return None
    return pending.graph.loss(pending, (reduction, ignore_index, scores._widened), labels, lambda: F.cross_entropy(
        scores.computed(), target, ignore_index=ignore_index, reduction=reduction))


class PendingScores(Pending):
    """The scores of one step, and what was made of them, that are not computed yet.

    Attributes:
        graph: whose scores.
        place: of the scores among its results.
        shape: of the scores.
        seed: which the graph's random numbers follow from.
        joined: whether their loss was computed without them.
    """

    graph: Scores

    def __init__(self, graph: Scores, given: Sequence[Any], place: int, shape: torch.Size) -> None:
        super().__init__(graph, given, _random.state("cpu"), "cpu")
        self.place, self.shape, self.joined, self.seed = place, shape, False, graph.draw()
        self._kept: list[weakref.ref[DeferredScores]] = []

    @property
    def is_open(self) -> bool:
        """Whether nothing is computed yet."""
        return self._results is None and not self.joined

    def may_join(self) -> bool:
        """Whether the graph can run now as it would have run when it was called, with a loss."""
        return self._modes == torch_modes() and _is_plain() and self.graph.may_defer(self.given)

    def run(self) -> Sequence[Any]:
        with _random.fixed(self.seed):
            return super().run()

    def run_with(self, joined: Callable[..., Sequence[Any]], labels: Tensor) -> Tensor:
        """The loss, by a graph that has it."""
        self.refuse_changes()
        with _random.fixed(self.seed):
            loss: Tensor = joined(*self.given, labels)[self.place]
        return loss

    def keep(self, made: DeferredScores) -> None:
        """Has it computed with the scores: later they may be changed in place."""
        self._kept.append(weakref.ref(made))

    def results(self) -> Sequence[Any]:
        if self._results is None:
            results = super().results()
            with torch.inference_mode(False), torch.enable_grad():
                for reference in self._kept:
                    if (made := reference()) is not None:
                        made._take(results[self.place])
        assert self._results is not None
        return self._results


class _Step:
    """One step that is watched: the losses that got its scores."""

    def __init__(self, results: Sequence[Any]) -> None:
        self.losses: list[int] = []  # the output of the node that each is of; -1 where it is none of its views
        self._memory = [StorageWeakRef(value.untyped_storage()) for value in results]
        weak: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]
        self._tensors = [weak(value) for value in results]  # the engine may keep their memory
        self._outputs = {value.output_nr: i for i, value in enumerate(results) if value.grad_fn is not None}

    def note(self, scores: Tensor) -> None:
        """A loss gets a tensor that comes from the node's outputs."""
        node: Any = scores.grad_fn
        output = scores.output_nr
        while type(node).__name__ in _VIEWS:
            node, output = node.next_functions[0]
        is_view = WATCHED in node.metadata and not scores._backward_hooks
        self.losses.append(output if is_view else -1)

    def scores(self, gradients: Sequence[Tensor | None]) -> int | None:
        """When backward reaches the node: the result that went into one loss, if no code can read any result."""
        if len(self.losses) != 1 or self.losses[0] not in self._outputs:
            return None
        output = self.losses[0]
        gradient = gradients[output]
        if gradient is None or any(other is not None for i, other in enumerate(gradients) if i != output):
            return None
        place = self._outputs[output]
        memory, over = self._memory[place], StorageWeakRef(gradient.untyped_storage())
        alone = memory.expired() or memory == over  # scores without a reference hold their gradient
        others = [tensor for i, tensor in enumerate(self._tensors) if i != place]
        return place if alone and all(tensor.expired() for tensor in others) else None


def applies(results: Sequence[Any]) -> bool:
    """Whether results are tensors, with scores among them and no loss."""
    return (all(isinstance(value, Tensor) for value in results) and not any(map(is_loss, results))
            and any(_may_be_scores(value) for value in results))


def _may_be_scores(value: Tensor) -> bool:
    return value.is_floating_point() and value.dim() > 1 and isinstance(value.shape[-1], int)


def _is_plain() -> bool:
    """Whether nothing of torch's in this thread looks at what is computed, or is computing gradients, and its
    cross_entropy is torch's own: one in its place may call torch's, which calls it again for a tensor of ours.
    """
    code = getattr(F.cross_entropy, "__code__", None)
    return (code is not None and code.co_filename == F.__file__ and not saved_by_hooks()
            and torch._C._current_graph_task_id() == -1 and not torch._C._len_torch_dispatch_stack()
            and not torch._C._are_functorch_transforms_active()
            and not (torch._C._len_torch_function_stack() and function_mode() is not None))


class Scores(Reads):
    """One graph, and whether a loss outside the module is computed with it.

    Args:
        run: computes all results.
        with_loss: of the place of the scores, reduction, ignore_index and whether scores are made float32: makes a
            function as `run`, of one more argument, the labels, with the loss in that place.
        shapes: of a place: a function of the graph's arguments that gives the result's shape, or None.
        parts: gives the Parts of the module.
        model: gives the graph's ORTModule, or None before the first step.
    """

    def __init__(self, run: Callable[..., Sequence[Any]], with_loss: Callable[..., Callable[..., Sequence[Any]]],
                 shapes: Callable[[int], Callable[[Sequence[Any]], torch.Size | None]], parts: Callable[[], Any],
                 model: Callable[[], Any]) -> None:
        super().__init__()
        self.run, self._with_loss, self._shapes, self._parts, self._model = run, with_loss, shapes, parts, model
        disabled = options.read("ONNXTRAIN_DISABLE").split(",")
        self._is_off = "outside_loss" in disabled or "unread" in disabled  # for good
        self._steps = self._misses = 0
        self._kinds: list[tuple[torch.dtype, torch.device]] = []  # of the results
        self._place: int | None = None
        self._shape: Callable[[Sequence[Any]], torch.Size | None] = lambda given: None
        self._wanted: set[tuple[bool, ...]] = set()  # which arguments had a gradient in watched steps
        self._joined: dict[tuple[Any, ...], Callable[..., Sequence[Any]]] = {}
        self._is_trying = False

    def __call__(self, *given: Any) -> Sequence[Any]:
        """The graph's results."""
        if self._is_off or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return self.run(*given)
        if self._steps < STEPS:
            return self._watch(given)
        if not _is_plain() or not self.may_defer(given):
            return self.run(*given)
        shape = self._shape(given)
        if shape is None or shape.numel() < LEAST_ELEMENTS:
            return self.run(*given)
        return self._defer(given, shape)

    def may_defer(self, given: Sequence[Any]) -> bool:
        """Whether running the graph later, or again, has the same effect."""
        return (not self._is_off and _wanted(given) in self._wanted and self._parts().may_defer(self._model())
                and not any(isinstance(value, Tensor) and value.is_inference() for value in given))

    def draw(self) -> Any:
        """Draws what a run draws from torch's generator."""
        return self._parts().put_off(self._model())

    def _watch(self, given: Sequence[Any]) -> Sequence[Any]:
        """Computes a step and looks, when backward reaches it, where its scores have gone."""
        before = torch.get_rng_state()
        results = self.run(*given)
        node: Any = next((value.grad_fn for value in results if value.grad_fn is not None and _may_be_scores(value)
                          and value.numel() >= LEAST_ELEMENTS), None)
        if not (self._parts().is_node(node) and self._parts().may_defer(self._model()) and _is_plain()
                and self._draws_as(before)):
            self._miss()
            return results
        step, wanted = _Step(results), _wanted(given)
        kinds = [(value.dtype, value.device) for value in results]
        shapes = [value.shape if value.is_contiguous() else None for value in results]

        def look(gradients: Sequence[Tensor | None]) -> None:
            place = step.scores(gradients)
            if self._steps >= STEPS or place is None or shapes[place] != self._shapes(place)(given):
                self._miss()
                return
            self._steps = self._steps + 1 if place == self._place else 1
            self._kinds, self._place, self._shape = kinds, place, self._shapes(place)
            self._wanted.add(wanted)

        node.metadata[WATCHED] = step
        watch(node, look)
        return results

    def _draws_as(self, before: Tensor) -> bool:
        """Whether a run of the graph draws from torch's generator what draw() does."""
        generator = torch.Generator()
        generator.set_state(before)
        if self._parts().is_random(self._model()):
            _random.draw(generator)
        return torch.equal(generator.get_state(), torch.get_rng_state())

    def _miss(self) -> None:
        if self._steps < STEPS:
            self._misses, self._steps = self._misses + 1, 0
            self._is_off = self._misses == MISSES

    def _defer(self, given: Sequence[Any], shape: torch.Size) -> Sequence[Any]:
        assert self._place is not None
        self._quiet += 1
        pending = PendingScores(self, given, self._place, shape)
        scores = torch.empty(shape, dtype=self._kinds[self._place][0], device="meta")
        return tuple([DeferredScores._like(scores, pending) if i == self._place else UnreadResult.of(pending, i, *kind)
                      for i, kind in enumerate(self._kinds)])

    def loss(self, pending: PendingScores, settings: tuple[Any, ...], labels: Tensor,
             plain: Callable[[], Tensor]) -> Tensor:
        """The loss of scores that are not computed.

        Args:
            settings: what with_loss() takes besides the place.
            labels: int64, of the shape of the scores without the classes.
            plain: computes scores and loss one after the other.
        """
        joined = self._joined.get(settings)
        if joined is None:
            return self._try(pending, settings, labels, plain)
        by_torch = self._parts().torch_graphs
        try:
            loss = pending.run_with(joined, labels)
        except Exception as error:
            loss = plain()  # raises what is wrong with the arguments
            self._give_up(f"the graph that includes the loss does not run: {error}")
            return loss
        node: Any = loss.grad_fn
        if self._parts().torch_graphs > by_torch or not self._parts().is_node(node):
            self._give_up("PyTorch runs the graph that includes the loss")
            return plain()
        pending.compute_before(node)
        pending.joined = True
        return loss

    def _try(self, pending: PendingScores, settings: tuple[Any, ...], labels: Tensor,
             plain: Callable[[], Tensor]) -> Tensor:
        """Computes a loss both ways; it must be the same."""
        self._is_trying = True
        try:
            given, loss = pending.given, plain()
        finally:
            self._is_trying = False
        if len(self._joined) == MAX_JOINED:
            self._give_up("the settings of the loss change at each step")
            return loss
        by_torch = self._parts().torch_graphs
        try:
            joined = self._with_loss(pending.place, *settings)
            with _random.fixed(pending.seed):
                other = joined(*given, labels)[pending.place]
        except Exception as error:
            self._give_up(f"the graph that includes the loss does not run: {error}")
            return loss
        if self._parts().torch_graphs > by_torch or not self._parts().is_node(other.grad_fn):
            self._give_up("PyTorch runs the graph that includes the loss")
        elif loss.dtype is not other.dtype or not is_close(loss, other):
            self._give_up(f"the loss is {other.item()} in the graph, and {loss.item()} when PyTorch computes it")
        else:
            if not self._joined:
                self._parts().note_joined(self._model(), 1)
                _log.info("ORTModule computes the loss outside the module together with it, and scores only when code "
                          "reads them")
            self._joined[settings] = joined
        return loss

    def was_read(self) -> None:
        if not self._is_trying:
            super().was_read()

    def _give_up(self, reason: str) -> None:
        if self._joined:
            self._parts().note_joined(self._model(), -1)
        self._is_off = True
        self._joined.clear()
        _log.info("ORTModule computes the scores for the loss outside the module, because %s", reason)


def _wanted(given: Sequence[Any]) -> tuple[bool, ...]:
    """Which arguments want a gradient."""
    return tuple([isinstance(value, Tensor) and value.requires_grad for value in given])
