"""pytest plugin of run.py: torch.cuda without a device, a choice of cases, and a line of JSON for each.

It runs as conftest.py in a copy of that folder; it knows the engine only by onnxtrain.stats().
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import onnxtrain
import onnxtrain.compat.onnxruntime  # noqa: F401  before the files import it

SETTINGS = json.loads(os.environ["UPSTREAM"])


class _Stream:
    """On the CPU everything happens in order."""

    def wait_stream(self, other: Any) -> None:
        """Nothing is under way."""

    synchronize = query = record_event = wait_event = lambda self, *_: None


def _autocast(enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> Any:
    """torch.cuda.amp.autocast's own parameters, for the CPU; there it has no float16 where bfloat16 was not asked for."""
    return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def _read_as_cpu() -> None:
    nothing = lambda *_, **__: None  # noqa: E731
    for name in ("manual_seed", "manual_seed_all", "synchronize", "empty_cache", "reset_peak_memory_stats", "_sleep"):
        setattr(torch.cuda, name, nothing)
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
        setattr(torch.cuda, name, lambda *_: 0)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda *_: _Stream()
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.amp.autocast = _autocast


def _without_hub() -> None:
    """bert-base-uncased and its like without a network: transformers' defaults are that model's configuration."""
    try:
        import transformers
    except ImportError:
        return

    def from_pretrained(name: str, *_: Any, **kwargs: Any) -> Any:
        return transformers.AutoConfig.for_model(name.split("/")[-1].split("-")[0], **kwargs)

    transformers.AutoConfig.from_pretrained = from_pretrained


_read_as_cpu()
_without_hub()
sys.modules.setdefault("wget", types.ModuleType("wget"))  # imported, and used for data sets only


class TooLong(Exception):
    """A case ran past its limit."""


def _ring(*_: Any) -> None:
    raise TooLong(f"{SETTINGS['seconds']} s")


def _function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The cases that were asked for."""
    all_items = items
    if SETTINGS["first"]:
        seen: Counter[str] = Counter()
        for item in items:
            seen[_function(item)] += 1
            item.number = seen[_function(item)]
        items = [item for item in items if item.number <= SETTINGS["first"]]
    chosen = items[SETTINGS["at"]::SETTINGS["every"]]
    if SETTINGS["only"]:
        names = set(Path(SETTINGS["only"]).read_text(encoding="utf-8").split("\n"))
        chosen = [item for item in chosen if item.nodeid in names]
    done = {json.loads(line)["id"] for known in SETTINGS["known"] if Path(known).exists()
            for line in Path(known).read_text(encoding="utf-8").splitlines()}
    all_items[:] = [item for item in chosen if item.nodeid not in done]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The time limit."""
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(SETTINGS["seconds"])
    try:
        yield
    finally:
        signal.alarm(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """What became of a case."""
    outcome = yield
    result = outcome.get_result()
    if call.when == "setup":
        item.before = onnxtrain.stats()
    if call.when == "teardown" or call.when == "setup" and result.outcome == "passed":
        return
    before, now = item.before, onnxtrain.stats()
    line = {"id": item.nodeid, "outcome": result.outcome, "seconds": round(call.duration, 2),
            "engine": now["engine_steps"] - before["engine_steps"],
            "fallback": now["fallback_steps"] - before["fallback_steps"],
            "reasons": now["reasons"][len(before["reasons"]):][:3],
            "error": "" if result.outcome == "passed" else " ".join(str(result.longrepr)[-600:].split())}
    with open(SETTINGS["out"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
