"""Where the time of a step goes: profile(model).

Nodes are named after the user's modules, so tables and Perfetto show where in the model the time goes.
The core records the times; see _timing.py.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtrain._timing import Kernel, Recorder, Span, module_of

if TYPE_CHECKING:
    import torch

    from onnxtrain.ortmodule._module import ORTModule

COLLECT_EVERY = 64  # calls after which the core's records are taken, which has a limit of them
_GROUPS = ("module", "operator", "node")


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Of the union."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _name(kernel: Kernel, by: str, depth: int | None) -> str:
    if by == "operator":
        return kernel.operator
    if by == "node":
        return f"{kernel.node}  {kernel.operator}  {kernel.kernel}  {kernel.shape}"
    return ".".join(module_of(kernel.node).split(".")[:depth]) or "(top)"


def _line(name: str, row: Sequence[float], total: float) -> str:
    forward, backward, calls, size = row
    return (f"{(forward + backward) * 1e3:10.3f} {(forward + backward) / total:6.1%} {forward * 1e3:10.3f} "
            f"{backward * 1e3:10.3f} {calls:7} {size / 2**20:9.1f}  {name}")


def _engines(model: torch.nn.Module) -> list[ORTModule]:
    """The ORTModules that a module is or holds."""
    found: list[Any] = []
    left, seen = [model], set[int]()
    while left:  # not modules(), in which an ORTModule is the module that it wraps
        module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found += [module] if hasattr(module, "_all_programs") else []
            left += getattr(module, "_modules", {}).values()
    if not found:
        raise TypeError(f"profile() takes an ORTModule, or a module that holds one, not {type(model).__name__}: "
                        "model = ORTModule(model), then profile(model)")
    return found


class Profile:
    """Records the steps of a module within `with`; see profile().

    Attributes:
        kernels, spans: what was recorded.
        seconds: from begin to end of the recording; None before the end.
        calls: of the module's forward.
        export_seconds: of exports and builds of programs within.
        deliver_seconds: of updates and reductions of gradients within backward.
        lost: forwards and backwards that are missing.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._models = _engines(model)
        self._recorder: Recorder | None = None
        self.kernels: list[Kernel] = []
        self.spans: list[Span] = []
        self.seconds: float | None = None
        self.calls = self.lost = 0
        self.export_seconds = self.deliver_seconds = 0.0

    def __enter__(self) -> Profile:
        if self._recorder is not None:
            raise RuntimeError("this profile is recording already")
        self._recorder = Recorder(lambda: _sessions(self._models))
        self._calls = [_timed_calls(model, self._recorder) for model in self._models]
        self._building = _building(self._models)
        self._recorder.start()
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, recorder = time.monotonic() - self._start, self._recorder
        assert recorder is not None
        self._recorder = None
        recorder.stop()
        for restore in self._calls:
            restore()
        self.kernels, self.spans = recorder.kernels, recorder.spans
        self.calls = sum(span.kind == "call" for span in self.spans)
        self.export_seconds = max(_building(self._models) - self._building, 0.0)
        self.deliver_seconds, self.lost = recorder.deliver_seconds, recorder.lost

    def __str__(self) -> str:
        if self.seconds is None:
            return "The profile has no step yet: run steps within `with onnxtrain.profile(model) as p:`, then print p."
        inside = sum(kernel.end - kernel.start for kernel in self.kernels)
        backward = sum(kernel.end - kernel.start for kernel in self.kernels if kernel.backward)
        head = (f"{self.calls} calls of the module in {self.seconds * 1e3:.3f} ms: {len(self.kernels)} kernels, "
                f"{inside * 1e3:.3f} ms, of which forward {(inside - backward) * 1e3:.3f} ms and backward "
                f"{backward * 1e3:.3f} ms" + (f"; {self.lost} forwards or backwards are missing" if self.lost else ""))
        return f"{head}\n{self.table()}"

    def _outside(self) -> list[tuple[str, float]]:
        """(what, seconds) of the time in which no kernel ran."""
        if self.seconds is None:
            return []
        covered: list[tuple[float, float]] = []
        alone = {}
        for kind in ("engine", "fallback", "optimizer", "call"):
            before = _length(covered)
            covered += [(span.start, span.end) for span in self.spans if span.kind == kind]
            alone[kind] = _length(covered) - before
        inside = sum(kernel.end - kernel.start for kernel in self.kernels)
        export = min(self.export_seconds, alone["call"])
        rows = [("(updates and reductions within backward)", self.deliver_seconds),
                ("(engine, between kernels)", max(alone["engine"] - inside - self.deliver_seconds, 0.0)),
                ("(export and build)", export),
                ("(forward outside the engine: capture, guards, Python, PyTorch)", alone["call"] - export),
                ("(PyTorch fallback)", alone["fallback"]),
                ("(optimizer)", alone["optimizer"]),
                ("(outside the module: loss, autograd, data, Python)", max(self.seconds - _length(covered), 0.0))]
        return [(name, seconds) for name, seconds in rows if seconds > 0]

    def table(self, by: str = "module", top: int = 30, depth: int | None = None) -> str:
        """Time by module, operator or node, largest first, and the time in which no kernel ran.

        Args:
            by: "module", "operator" or "node".
            top: rows of kernels at most; one more holds the others.
            depth: with "module", how many names of the path count: 2 puts `encoder.layers.0` under `encoder.layers`.
        """
        if by not in _GROUPS:
            raise ValueError(f"by is {by!r}, expected 'module', 'operator' or 'node'")
        rows: dict[str, list[float]] = {}
        for kernel in self.kernels:
            row = rows.setdefault(_name(kernel, by, depth), [0.0, 0.0, 0, 0])
            row[kernel.backward] += kernel.end - kernel.start
            row[2] += 1
            row[3] += kernel.bytes
        total = self.seconds or sum(kernel.end - kernel.start for kernel in self.kernels) or 1.0
        ordered = sorted(rows.items(), key=lambda item: -item[1][0] - item[1][1])
        lines = [f"{'ms':>10} {'share':>6} {'forward':>10} {'backward':>10} {'calls':>7} {'MiB':>9}  {by}"]
        lines += [_line(name, row, total) for name, row in ordered[:top]]
        if len(ordered) > top:
            rest = [sum(column) for column in zip(*[row for _, row in ordered[top:]])]
            lines.append(_line(f"({len(ordered) - top} others)", rest, total))
        lines += [f"{seconds * 1e3:10.3f} {seconds / total:6.1%} {'':39}  {name}" for name, seconds in self._outside()]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace, for https://ui.perfetto.dev."""
        found = [kernel.thread for kernel in self.kernels] + [span.thread for span in self.spans]
        threads = {thread: i for i, thread in enumerate(dict.fromkeys(found))}
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": i, "args": {"name": f"thread {i}"}}
            for i in threads.values()]
        timed: list[tuple[str, str, Kernel | Span, dict[str, object]]] = [
            (s.name, "module" if s.kind == "call" else s.kind, s, {}) for s in self.spans]
        timed += [(k.node, "backward" if k.backward else "forward", k,
                   {"operator": k.operator, "kernel": k.kernel, "shape": k.shape, "bytes": k.bytes})
                  for k in self.kernels]
        events += [{"name": name, "cat": category, "ph": "X", "ts": e.start * 1e6, "dur": (e.end - e.start) * 1e6,
                    "pid": os.getpid(), "tid": threads[e.thread], "args": args} for name, category, e, args in timed]
        fresh = Path(f"{os.fspath(path)}.new")  # the file is whole at every moment
        fresh.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
        fresh.replace(path)


def _sessions(models: list[ORTModule]) -> Iterator[tuple[Any, list[str]]]:
    """The sessions of modules, each with the paths of the modules whose weights it reads."""
    for program in [program for model in models for _, programs in model._all_programs() for program in programs]:
        paths = [source.target.rpartition(".")[0] for source in program.exported.inputs if source.kind == "parameter"]
        for session in program.sessions:
            yield session, paths


def _building(models: list[ORTModule]) -> float:
    """Seconds that exports and builds have taken so far."""
    from onnxtrain._report import stats

    counts = [stats(model) for model in models]
    return sum(count["export_seconds"] + count["build_seconds"] + count["specialise_seconds"] for count in counts)


def _timed_calls(model: ORTModule, recorder: Recorder) -> Callable[[], None]:
    """Notes the calls of a module's forward, until the function that is returned is called."""
    before, plain, calls = model.__dict__.get("_call"), model._call, 0

    def call(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        nonlocal calls
        with recorder.span("call", f"{type(model._module).__name__}.forward"):
            result = plain(args, kwargs)
        calls += 1
        recorder.hold() if calls % COLLECT_EVERY else recorder.collect()
        return result

    def restore() -> None:
        if model.__dict__.get("_call") is call:
            del model.__dict__["_call"]
            if before is not None:
                model.__dict__["_call"] = before

    model.__dict__["_call"] = call
    return restore


def profile(model: torch.nn.Module) -> Profile:
    """Records where the time of a module's steps goes, by the names of its modules.

        with onnxtrain.profile(model) as p:
            for batch in batches:
                step(batch)
        print(p)

    Nothing is built again, and outside of `with` a step costs what it did before. Within, a kernel takes about 0.1 us
    longer, and a call about 20 us. The first step may be among the recorded ones; its export is a row of its own.

    Args:
        model: an ORTModule, or a module that holds one, such as DistributedDataParallel.

    Raises:
        TypeError: there is no ORTModule.
    """
    return Profile(model)
