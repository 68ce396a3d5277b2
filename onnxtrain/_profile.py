"""DebugOptions(profile=path): a Chrome trace of every kernel, and `python -m onnxtrain profile` that reads it.

The core notes when each step of a program begins and ends; nodes are named after the user's modules, so Perfetto or
chrome://tracing shows where in the model the time goes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from onnxtrain import _C


class Profile:
    """The trace of one ORTModule. Events are gathered in memory and written when the process ends, or by write().

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
        self._events: list[dict[str, Any]] = []
        self._left = steps
        self._lock = threading.Lock()
        self._seen: dict[int, float] = {}  # per session: start of the latest step that has been read
        self._sessions: dict[int, Any] = {}
        self._written = 0  # events in the file
        atexit.register(self._write_rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Profile:
        return self

    def __reduce__(self) -> Any:
        return Profile, (str(self.path),)

    @property
    def wanted(self) -> bool:
        """Whether the next step is traced."""
        return self._left > 0

    def begin(self) -> float:
        """Before a forward: kernels note their times from now on."""
        _C.set_timing(True)
        return time.monotonic()

    def end(self, start: float, name: str, sessions: list[Any]) -> None:
        """After a forward; its backward is read when the next one begins, or at the end."""
        self._left -= 1
        self._add(f"{name}.forward", "module", start, time.monotonic(), {})
        for session in sessions:
            self.read(session)

    def read(self, session: Any) -> None:
        """Takes what a session has noted since it was last read."""
        with self._lock:
            self._sessions[id(session)] = session
            since = self._seen.get(id(session), 0.0)
            latest = since
            for node, operator, kernel, shape, backward, start, end in session.timeline():
                if start <= since or end <= 0:
                    continue
                latest = max(latest, start)
                self._add(node, "backward" if backward else "forward", start, end,
                          {"operator": operator, "kernel": kernel, "shape": shape})
            self._seen[id(session)] = latest

    def _add(self, name: str, category: str, start: float, end: float, args: dict[str, Any]) -> None:
        self._events.append({"name": name, "cat": category, "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6,
                             "pid": os.getpid(), "tid": 1 if category == "module" else 0, "args": args})

    def write(self) -> None:
        """The trace so far; the file is whole at every moment."""
        for session in list(self._sessions.values()):
            self.read(session)
        if not self._events:
            return
        names = [{"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": tid, "args": {"name": name}}
                 for tid, name in ((0, "kernels"), (1, "calls of the module"))]
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps({"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}),
                         encoding="utf-8")
        fresh.replace(self.path)
        self._written = len(self._events)

    def _write_rest(self) -> None:
        """When the process ends; not again what write() has written."""
        for session in list(self._sessions.values()):
            self.read(session)
        if len(self._events) > self._written:
            self.write()


def _module_of(node: str) -> str:
    return node.rpartition("/")[0]


def table(path: Path, top: int = 15) -> str:
    """Where the time of a trace went: by operator, by module and by node.

    Raises:
        ValueError: the file is not a trace of onnxtrain.
    """
    try:
        events = [e for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
                  if e.get("ph") == "X" and e.get("cat") in ("forward", "backward")]
        groups = [("operator", lambda e: e["args"]["operator"]), ("module", lambda e: _module_of(e["name"]) or "(top)"),
                  ("node", lambda e: f"{e['name']}  {e['args']['kernel']}  {e['args']['shape']}")]
        rows = [_grouped(title, key, events, top) for title, key in groups]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of onnxtrain: {error}") from error
    total = sum(e["dur"] for e in events)
    backward = sum(e["dur"] for e in events if e["cat"] == "backward")
    head = f"{len(events)} kernels, {total / 1e3:.3f} ms, of which backward {backward / 1e3:.3f} ms"
    return "\n\n".join([head, *rows])


def _grouped(title: str, key: Any, events: list[dict[str, Any]], top: int) -> str:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        entry = sums[key(event), event["cat"]]
        entry[0] += 1
        entry[1] += event["dur"]
    total = sum(entry[1] for entry in sums.values()) or 1.0
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])[:top]
    lines = [f"{'ms':>10} {'share':>6} {'calls':>7}  {title}"]
    lines += [f"{time_ / 1e3:10.3f} {time_ / total:6.1%} {count:7}  {name} ({category})"
              for (name, category), (count, time_) in ordered]
    return "\n".join(lines)
