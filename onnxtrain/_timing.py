"""Who listens to the times of steps: profile() and torch.profiler.

The core records every forward and backward while a Recorder runs. Several may run at once, of one module or of many.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onnxtrain import _C
from onnxtrain._torch import RecordFunctionFast, place

IN_PROFILER: Any = place("in_profiler")


class Kernel(NamedTuple):
    """One step of a program, in one run. Times are seconds of the monotonic clock."""

    node: str  # of the model; a backward step has the name of the node that it differentiates
    operator: str
    kernel: str
    shape: str
    bytes: int  # of operands and results
    backward: bool
    start: float
    end: float
    thread: int


class Span(NamedTuple):
    """Time that has a cause: "engine" (one forward or backward of a program), "call" (of the module), "fallback"
    (PyTorch runs the module) or "optimizer"."""

    kind: str
    name: str
    start: float
    end: float
    thread: int


class Recorder:
    """Gathers what the core records of some sessions, from start() to stop().

    Args:
        sessions: gives the sessions that belong to it now, each with the paths of the modules whose weights it reads.
    """

    def __init__(self, sessions: Callable[[], Iterable[tuple[_C.Session, Sequence[str]]]]) -> None:
        self.kernels: list[Kernel] = []
        self.spans: list[Span] = []
        self.deliver_seconds = 0.0  # of updates and reductions of gradients within backward
        self.lost = 0  # forwards and backwards whose times the core has dropped
        self._begun = 0.0
        self._held: dict[int, tuple[_C.Session, Sequence[str]]] = {}
        self._sessions = sessions

    def start(self) -> None:
        """The core records from now on."""
        with _lock:
            self._begun = time.monotonic()
            _recorders.append(self)
            _time_optimizers(True)
            _C.set_timing(True, True)

    def stop(self) -> None:
        """Takes what is left; the core stops where no other recorder runs."""
        self.collect()
        with _lock:
            _recorders.remove(self)
            _time_optimizers(bool(_recorders))
            _C.set_timing(bool(_recorders), bool(_recorders))

    def hold(self) -> None:
        """Notes the sessions that there are now; what they have recorded is kept where they go later."""
        self._held |= {id(session): (session, paths) for session, paths in self._sessions()}

    def collect(self) -> None:
        """Takes what the core has recorded of its sessions, for every recorder that has them."""
        self.hold()
        for session, paths in list(self._held.values()):
            with _lock:
                phases = session.timings()
                for recorder in _recorders:
                    if recorder is self or any(session is own for own, _ in recorder._sessions()):
                        recorder._add(phases, paths)

    def _add(self, phases: list[tuple[Any, ...]], paths: Sequence[str]) -> None:
        prefix = _prefix(paths, {module_of(step[0]) for phase in phases for step in phase[-1]})
        for backward, lost, thread, start, end, delivering, steps in phases:
            if start < self._begun:
                continue  # for another recorder
            self.lost += lost
            self.spans.append(Span("engine", "backward" if backward else "forward", start, end, thread))
            self.deliver_seconds += delivering
            self.kernels += [Kernel._make((prefix + step[0], *step[1:], thread)) for step in steps if step[-1] > 0]

    @contextlib.contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Notes how long its body takes."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.spans.append(Span(kind, name, start, time.monotonic(), threading.get_ident()))


def module_of(node: str) -> str:
    """The path of the user's module that a node comes from; "" where the exporter names none."""
    return node.rpartition("/")[0]


def _prefix(paths: Sequence[str], modules: Iterable[str]) -> str:
    """What goes before the names of a graph's nodes: "encoder." where Dynamo captured a part of the module `encoder`,
    as after a graph break, and names modules from there.

    Args:
        paths: of the modules whose weights the graph reads.
        modules: that its nodes name.
    """
    votes = Counter(path.removesuffix(module) for module in filter(None, modules) for path in set(paths)
                    if f".{path}".endswith(f".{module}"))
    if votes:
        return min(votes, key=lambda prefix: (-votes[prefix], len(prefix)))
    return f"{paths[0]}/" if len(set(paths)) == 1 and paths[0] else ""


_recorders: list[Recorder] = []
_lock = threading.RLock()


@contextlib.contextmanager
def span(kind: str, name: str) -> Iterator[None]:
    """Notes in every recorder how long its body takes."""
    with contextlib.ExitStack() as stack:
        for recorder in list(_recorders):
            stack.enter_context(recorder.span(kind, name))
        yield


# ---- optimizers ----

_begun = threading.local()  # .times: when the steps that are not over have begun, the innermost last
_hooks: list[Any] = []


def optimizer_begins(_optimizer: object, _args: object, _kwargs: object) -> None:
    """A hook before step(). It changes nothing, so step_in_backward() allows it."""
    _begun.__dict__.setdefault("times", []).append(time.monotonic())


def _optimizer_ends(optimizer: object, _args: object, _kwargs: object) -> None:
    end, begun = time.monotonic(), _begun.__dict__.get("times")
    if begun:
        span = Span("optimizer", type(optimizer).__name__, begun.pop(), end, threading.get_ident())
        for recorder in _recorders:
            recorder.spans.append(span)


def _time_optimizers(on: bool) -> None:
    """Sets whether recorders hear of the steps of all optimizers."""
    if on and not _hooks:
        _hooks.extend((register_optimizer_step_pre_hook(optimizer_begins),
                       register_optimizer_step_post_hook(_optimizer_ends)))
    while _hooks and not on:
        _hooks.pop().remove()


# ---- torch.profiler ----

in_ranges = False  # whether each step is a range of torch.profiler


def switch_ranges() -> None:
    """Makes each step a range of torch.profiler, or stops that, after a profiler has started or ended."""
    global in_ranges
    in_ranges = getattr(*IN_PROFILER)
    _C.set_ranges(RecordFunctionFast if in_ranges else None)
