"""Where the time of a step goes: profile(model), DebugOptions(profile=path), and `python -m onnxtrain profile`.

Nodes are named after the user's modules, so tables and Perfetto show where in the model the time goes.
The core records the times; see _timing.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from onnxtrain._timing import Kernel, Recorder, Span, module_of

COLLECT_EVERY = 64  # calls after which the core's records are taken, which has a limit of them
_GROUPS = ("module", "operator", "node")
_CATEGORIES = {"call": "module", "engine": "engine", "fallback": "fallback", "optimizer": "optimizer"}


@dataclasses.dataclass
class Times:
    """What was recorded of some steps.

    Attributes:
        seconds: from begin to end of the recording; None: only the kernels are known.
        calls: of the module's forward.
        export_seconds: of exports and builds of programs within.
        deliver_seconds: of updates and reductions of gradients within backward.
        lost: forwards and backwards that are missing.
    """

    kernels: list[Kernel]
    spans: list[Span]
    seconds: float | None = None
    calls: int = 0
    export_seconds: float = 0.0
    deliver_seconds: float = 0.0
    lost: int = 0

    def head(self) -> str:
        """One line: how many calls and kernels there were, and how long they took."""
        inside = sum(kernel.end - kernel.start for kernel in self.kernels)
        backward = sum(kernel.end - kernel.start for kernel in self.kernels if kernel.backward)
        text = (f"{len(self.kernels)} kernels, {inside * 1e3:.3f} ms, of which forward {(inside - backward) * 1e3:.3f} "
                f"ms and backward {backward * 1e3:.3f} ms")
        if self.seconds is not None:
            text = f"{self.calls} calls of the module in {self.seconds * 1e3:.3f} ms: {text}"
        return text + (f"; {self.lost} forwards or backwards are missing" if self.lost else "")

    def outside(self) -> list[tuple[str, float]]:
        """(what, seconds) of the time in which no kernel ran, where the whole time is known."""
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
        rows: dict[str, list[Any]] = {}
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
        lines += [f"{seconds * 1e3:10.3f} {seconds / total:6.1%} {'':39}  {name}" for name, seconds in self.outside()]
        return "\n".join(lines)

    def text(self) -> str:
        """The tables by operator, module and node."""
        return "\n\n".join([self.head(), *[self.table(by, 15) for by in ("operator", "module", "node")]])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace."""
        found = [kernel.thread for kernel in self.kernels] + [span.thread for span in self.spans]
        threads = {thread: i for i, thread in enumerate(dict.fromkeys(found))}
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": i, "args": {"name": f"thread {i}"}}
            for i in threads.values()]
        timed: list[tuple[str, str, Any, dict[str, Any]]] = [(s.name, _CATEGORIES[s.kind], s, {}) for s in self.spans]
        timed += [(k.node, "backward" if k.backward else "forward", k,
                   {"operator": k.operator, "kernel": k.kernel, "shape": k.shape, "bytes": k.bytes})
                  for k in self.kernels]
        events += [{"name": name, "cat": category, "ph": "X", "ts": e.start * 1e6, "dur": (e.end - e.start) * 1e6,
                    "pid": os.getpid(), "tid": threads[e.thread], "args": args} for name, category, e, args in timed]
        own = {name: getattr(self, name) for name in ("seconds", "calls", "export_seconds", "deliver_seconds", "lost")}
        _write(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "onnxtrain": own}))

    @staticmethod
    def read(path: Path) -> Times:
        """What save() has written.

        Raises:
            ValueError: the file is not a trace of onnxtrain.
        """
        kinds = {category: kind for kind, category in _CATEGORIES.items()}
        try:
            trace = json.loads(path.read_text(encoding="utf-8"))
            times = Times([], [], **trace["onnxtrain"])
            for e in trace["traceEvents"]:
                if e["ph"] != "X":
                    continue
                start, end, args = e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["args"]
                if e["cat"] in kinds:
                    times.spans.append(Span(kinds[e["cat"]], e["name"], start, end, e["tid"]))
                else:
                    times.kernels.append(Kernel(e["name"], args["operator"], args["kernel"], args["shape"],
                                                args["bytes"], e["cat"] == "backward", start, end, e["tid"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a trace of onnxtrain: {error}") from error
        return times


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


def _line(name: str, row: list[Any], total: float) -> str:
    forward, backward, calls, size = row
    return (f"{(forward + backward) * 1e3:10.3f} {(forward + backward) / total:6.1%} {forward * 1e3:10.3f} "
            f"{backward * 1e3:10.3f} {calls:7} {size / 2**20:9.1f}  {name}")


def _engines(model: Any) -> list[Any]:
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
    """Records the steps of a module within `with`; see profile()."""

    def __init__(self, model: Any) -> None:
        self._models = _engines(model)
        self._times = Times([], [])
        self._recorder: Recorder | None = None

    def __enter__(self) -> Profile:
        if self._recorder is not None:
            raise RuntimeError("this profile is recording already")
        self._recorder = Recorder(lambda: _sessions(self._models))
        self._calls = [_timed_calls(model, self._recorder) for model in self._models]
        self._building = _building(self._models)
        self._recorder.start()
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: Any) -> None:
        seconds, recorder = time.monotonic() - self._start, self._recorder
        assert recorder is not None
        self._recorder = None
        recorder.stop()
        for restore in self._calls:
            restore()
        calls = sum(span.kind == "call" for span in recorder.spans)
        self._times = Times(recorder.kernels, recorder.spans, seconds, calls,
                            max(_building(self._models) - self._building, 0.0), recorder.deliver_seconds, recorder.lost)

    def __str__(self) -> str:
        if not self._times.kernels and self._times.seconds is None:
            return "The profile has no step yet: run steps within `with onnxtrain.profile(model) as p:`, then print p."
        return f"{self._times.head()}\n{self.table()}"

    def table(self, by: str = "module", top: int = 30, depth: int | None = None) -> str:
        """See Times.table()."""
        return self._times.table(by, top, depth)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace, for https://ui.perfetto.dev and `python -m onnxtrain profile`."""
        self._times.save(path)


def _write(path: str | os.PathLike[str], text: str) -> None:
    """The file is whole at every moment."""
    fresh = Path(f"{os.fspath(path)}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _named(program: Any) -> Iterator[tuple[Any, list[str]]]:
    """The sessions of a program, with the modules whose weights it reads."""
    paths = [source.target.rpartition(".")[0] for source in program.exported.inputs if source.kind == "parameter"]
    for session in program.sessions:
        yield session, paths


def _sessions(models: list[Any]) -> Iterator[tuple[Any, list[str]]]:
    for model in models:
        for _, programs in model._all_programs():
            for program in programs:
                yield from _named(program)


def _building(models: list[Any]) -> float:
    """Seconds that exports and builds have taken so far."""
    from onnxtrain._report import stats

    counts = [stats(model) for model in models]
    return sum(count["export_seconds"] + count["build_seconds"] + count["specialise_seconds"] for count in counts)


def _timed_calls(model: Any, recorder: Recorder) -> Callable[[], None]:
    """Notes the calls of a module's forward, until the function that is returned is called."""
    before, plain, calls = model.__dict__.get("_call"), model._call, 0

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def profile(model: Any) -> Profile:
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


class Trace:
    """The trace of one ORTModule for DebugOptions(profile=path), written when the process ends, or by write().

    Args:
        path: of the JSON file; its folder must exist and be writable.
        steps: forwards that are traced, with their backwards; later ones are not.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, path: str, steps: int = 100) -> None:
        import atexit

        self.path = Path(path)
        folder = self.path.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(f"{folder} is not a folder that can be written")
        self._left = steps
        self._sessions: dict[int, tuple[Any, list[str]]] = {}
        self._recorder = Recorder(lambda: list(self._sessions.values()))
        self._runs = False
        self._written = 0  # kernels in the file
        atexit.register(self._write_rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return self

    def __reduce__(self) -> Any:
        return Trace, (str(self.path),)

    def call(self, program: Any, name: str, run: Callable[[], Any]) -> Any:
        """Runs a forward; its backward is recorded until the forward behind the last one that is traced."""
        if self._left <= 0:
            self._stop()
            return run()
        if not self._runs:
            self._recorder.start()
            self._runs = True
        self._left -= 1
        self._sessions |= {id(session): (session, paths) for session, paths in _named(program)}
        with self._recorder.span("call", f"{name}.forward"):
            result = run()
        self._recorder.collect()
        return result

    def _stop(self) -> None:
        if self._runs:
            self._runs = False
            self._recorder.stop()
            self._sessions.clear()

    def write(self) -> None:
        """The trace so far."""
        if self._runs:
            self._recorder.collect()
        if not self._recorder.kernels:
            return
        Times(self._recorder.kernels, self._recorder.spans).save(self.path)
        self._written = len(self._recorder.kernels)

    def _write_rest(self) -> None:
        """When the process ends; not again what write() has written."""
        self._stop()
        if len(self._recorder.kernels) > self._written:
            self.write()


def table(path: Path) -> str:
    """Where the time of a trace went: by operator, by module and by node.

    Raises:
        ValueError: the file is not a trace of onnxtrain.
    """
    return Times.read(path).text()
