"""Results that no code reads are not computed: scores, hidden states or a cache that a model returns beside its loss.

A graph with a loss among its results is watched for STEPS training steps. Where no reference to another result is left
when backward begins, and no gradient reaches it, the graph is exported once more without that result, and an
UnreadResult stands for it from then on: a tensor that is computed by the whole graph, from the same arguments and
random numbers, when anything reads it. Where that happens often, each step computes all results again. Without its
scores a step computes only the rows of the head that have a label, stores no scores of a large vocabulary, and skips
padding up to the loss.

Called by dynamo.py for the graphs of an ORTModule. ONNXTRAIN_DISABLE=unread leaves it out.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onnxtrain import options
from onnxtrain.ortmodule import _random
from onnxtrain.ortmodule._key import torch_modes

STEPS = 4  # in which no code reads a result before it is left out
READS = 2  # steps in which code reads one after all, with fewer than QUIET steps between two
QUIET = 8
LEAST_ELEMENTS = 1 << 18  # of a result; smaller ones alone are cheap
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # of a loss without the other results; else 2e-2
_log = logging.getLogger("onnxtrain")


def refuse_gradient(gradient: Tensor) -> None:
    """Raises: the gradient of a result that stands for another tensor would be lost."""
    raise RuntimeError("code outside Python passes a gradient to a result of an ORTModule that was not computed yet. "
                       "Call clone() on the result first, or set ONNXTRAIN_DISABLE=unread.")


class UnreadResult(Tensor):
    """Stands for a result that is computed when it is read. Every function of torch reads it, but for its dtype and
    device, and float(), which accelerate calls on all results of a model in 16 bits."""

    _pending: Pending
    _place: int

    @staticmethod
    def of(pending: Pending, place: int, dtype: torch.dtype, device: torch.device) -> UnreadResult:
        """The result at this place of a graph's results."""
        may_have_gradient = dtype.is_floating_point or dtype.is_complex
        with torch._C.DisableTorchFunctionSubclass():
            made = Tensor._make_wrapper_subclass(UnreadResult, (0,), dtype=dtype, device=device,
                                                 requires_grad=may_have_gradient)
            if may_have_gradient:  # autograd.Function.apply() does not ask __torch_function__
                made.register_hook(refuse_gradient)
        made._pending, made._place = pending, place
        return made

    def computed(self) -> Tensor:
        """The tensor for which this one stands."""
        result: Tensor = self._pending.results()[self._place]
        return result.to(self.dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args)
        if function is Tensor.float and not kwargs:
            (unread,) = args
            return UnreadResult.of(unread._pending, unread._place, torch.float32, unread.device)
        args, kwargs = pytree.tree_map_only(UnreadResult, UnreadResult.computed, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"code outside Python called {function} on a result of an ORTModule that was not computed "
                           "yet. Call clone() on the result first, or set ONNXTRAIN_DISABLE=unread.")


_KNOWN = frozenset(getattr(Tensor, name).__get__ for name in ("dtype", "device", "layout", "is_cuda", "is_cpu",
                                                              "is_sparse", "is_nested", "is_quantized", "is_meta")
                   ) | {Tensor.is_floating_point, Tensor.is_complex}


class Pending:
    """The results of one step that are not computed yet.

    Attributes:
        graph: that computes them.
        given: its arguments; empty when they are not needed any more.
        random: state of the generators when the step ran.
    """

    def __init__(self, graph: Any, given: Sequence[Any], random: Any, device: str) -> None:
        self.graph, self.given, self.random, self._device = graph, given, random, device
        self._versions, self._modes = _versions(given), torch_modes()
        self._results: Sequence[Any] | None = None

    def results(self) -> Sequence[Any]:
        """All results of the graph.

        Raises RuntimeError where weights, arguments or torch's modes have changed since.
        """
        if self._results is None:
            kind = torch.device(self._device).type
            enabled, dtype = self._modes[:2] if kind == "cpu" else self._modes[2:4]
            with torch.inference_mode(False), torch.autocast(kind, dtype, enabled), torch.enable_grad():
                self.refuse_changes()
                self.graph.was_read()
                later = _random.state(self._device)
                _random.restore(self._device, self.random)
                try:
                    self._results = self.run()
                finally:
                    _random.restore(self._device, later)
            self.given = ()
        return self._results

    def compute_before(self, node: Any) -> None:
        """Computes the results when backward of the loss's node begins, if code still holds one: weights can change
        after it."""
        held = weakref.ref(self)

        def compute_if_held(gradients: Sequence[Tensor | None]) -> None:
            if (pending := held()) is not None:
                pending.results()

        watch(node, compute_if_held)

    def run(self) -> Sequence[Any]:
        """All results of the graph."""
        results: Sequence[Any] = self.graph.run(*self.given)
        return results

    def refuse_changes(self) -> None:
        """Raises RuntimeError where weights, arguments or torch's modes have changed since."""
        if self._versions != _versions(self.given) or self._modes != torch_modes():
            raise RuntimeError(
                f"ORTModule did not compute a result, because no code read it in {STEPS} steps. It cannot now: "
                "weights, arguments or torch's modes have changed. Read the result before the optimizer's step, or set "
                "ONNXTRAIN_DISABLE=unread.")


def _versions(given: Sequence[Any]) -> list[int]:
    """How often each tensor was changed in place."""
    return [value._version for value in given if isinstance(value, Tensor) and not value.is_inference()]


def is_loss(value: Any) -> bool:
    """Whether a result is what a training step calls backward() on."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def applies(results: Sequence[Any]) -> bool:
    """Whether there is a loss among results, and anything beside it."""
    return any(map(is_loss, results)) and any(isinstance(value, Tensor) and not is_loss(value) for value in results)


class Reads:
    """Counts the steps in which code reads results that were not computed for it."""

    def __init__(self) -> None:
        self._reads = 0
        self._quiet = 0  # steps since the latest of them

    def was_read(self) -> None:
        """A step's results were computed after all."""
        self._reads = 1 if self._quiet > QUIET else self._reads + 1
        self._quiet = 0
        if self._reads == READS:
            self._give_up("code reads results that it did not read before: every step computes all of them again")

    def _give_up(self, reason: str) -> None:
        """Has all results computed at each step from now on."""
        raise NotImplementedError


class Results(Reads):
    """One graph, and which of its results no code reads.

    Args:
        run: computes all results.
        without: makes a function as `run` that computes None at these places.
        allowed: whether results may be left out now: the graph changes nothing but its results, so that running it
            again has no effect.
        note: is told how many results are left out, and how many less than before, below 0.
    """

    def __init__(self, run: Callable[..., Sequence[Any]],
                 without: Callable[[frozenset[int]], Callable[..., Sequence[Any]]],
                 allowed: Callable[[], bool], note: Callable[[int], None]) -> None:
        super().__init__()
        self.run, self._allowed, self._note = run, allowed, note
        disabled = "unread" in options.read("ONNXTRAIN_DISABLE").split(",")
        self._without = None if disabled else without  # None: all results are computed for good
        self._unread: dict[int, tuple[torch.dtype, torch.device]] | None = None  # of those that have been watched
        self._short: Callable[..., Sequence[Any]] | None = None  # leaves them out; from then on they stay the same
        self._steps = 0  # that have been watched

    def __call__(self, *given: Any) -> Sequence[Any]:
        """The graph's results."""
        if self._without is None or not torch.is_grad_enabled():
            return self.run(*given)
        if self._short is not None:
            return self._run_short(self._short, given) if self._allowed() else self.run(*given)
        if self._steps >= STEPS and self._allowed():
            return self._leave_out(self._without, given)
        results = self.run(*given)
        self._watch(results)
        return results

    def _give_up(self, reason: str) -> None:
        if self._short is not None and self._unread:
            self._note(-len(self._unread))
        self._without = self._short = None
        _log.info("ORTModule: %s", reason)

    def _watch(self, results: Sequence[Any]) -> None:
        """Looks, when backward begins, for results that are still held."""
        node = _node_of(results)
        if node is None:
            return
        if self._unread is None:
            self._unread = {i: (value.dtype, value.device) for i, value in enumerate(results)
                            if isinstance(value, Tensor) and not is_loss(value)}
        watched = [(i, weakref.ref(results[i]), results[i].output_nr if results[i].grad_fn is node else None)
                   for i in self._unread]
        large = any(results[i].numel() >= LEAST_ELEMENTS for i in self._unread)

        def look(gradients: Sequence[Tensor | None]) -> None:
            if self._short is not None or self._unread is None:
                return
            read = {i for i, result, place in watched
                    if result() is not None or place is not None and gradients[place] is not None}
            self._unread = {i: kind for i, kind in self._unread.items() if i not in read}
            self._steps += 1
            if not self._unread or not large:
                self._without = None

        watch(node, look)

    def _leave_out(self, without: Callable[[frozenset[int]], Callable[..., Sequence[Any]]],
                   given: Sequence[Any]) -> Sequence[Any]:
        """Runs a step both ways. Without the unread results, the others and the random numbers must be the same."""
        assert self._unread
        unread, device = self._unread, _device_of(self._unread)
        before = _random.state(device)
        results = self.run(*given)
        after = _random.state(device)
        try:
            short = without(frozenset(unread))
            _random.restore(device, before)
            others = short(*given)
            drawn = _random.state(device)
        except Exception as error:  # the whole graph runs
            self._give_up(f"every step computes results that no code reads, because the graph without them does not "
                          f"run: {error}")
            return results
        finally:
            _random.restore(device, after)
        same = torch.equal(drawn[0], after[0]) and drawn[1] == after[1] and all(
            is_close(a, b) for a, b in zip(results, others, strict=True) if is_loss(a))
        if not same or not self._allowed():
            self._give_up("every step computes results that no code reads, because the others differ without them")
        else:
            self._unread, self._short = unread, short
            self._note(len(unread))
            _log.info("ORTModule: no code reads %d results, so they are computed only when code reads them",
                      len(unread))
        return results

    def _run_short(self, short: Callable[..., Sequence[Any]], given: Sequence[Any]) -> Sequence[Any]:
        assert self._unread
        unread, device = self._unread, _device_of(self._unread)
        self._quiet += 1
        pending = Pending(self, given, _random.state(device), device)
        results = list(short(*given))
        node = _node_of(results)
        if node is None:
            self._give_up("a loss without a gradient is computed with all other results")
            _random.restore(device, pending.random)
            return self.run(*given)
        for i, kind in unread.items():
            results[i] = UnreadResult.of(pending, i, *kind)
        pending.compute_before(node)
        return tuple(results)


def watch(node: Any, look: Callable[[Sequence[Tensor | None]], None]) -> None:
    """Calls look() with the gradients that reach an autograd node, before its backward. Its metadata says so."""
    node.metadata["onnxtrain_watched"] = True
    node.register_prehook(look)


def _node_of(results: Sequence[Any]) -> Any:
    """The autograd node of the loss, or None."""
    return next((value.grad_fn for value in results if is_loss(value) and value.grad_fn is not None), None)


def _device_of(unread: dict[int, tuple[torch.dtype, torch.device]]) -> str:
    return str(next(iter(unread.values()))[1])


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two losses are the same but for rounding."""
    tolerance = _TOLERANCE.get(a.dtype, 2e-2)
    return torch.allclose(a.detach(), b.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
