"""pytest plugin of run.py: torch.cuda without a device, a choice of cases, and a line of JSON for each.

It runs as conftest.py in a copy of that folder; it knows the engine only by onnxtrain.stats().
"""

from __future__ import annotations

import contextlib
import dataclasses
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
import stand_ins
import torch

import onnxtrain
import onnxtrain.compat.onnxruntime  # noqa: F401  before the files import it
from onnxtrain.training import orttrainer_options

SETTINGS = json.loads(os.environ["UPSTREAM"])


class _Stream:
    """On the CPU everything happens in order."""

    def wait_stream(self, other: Any) -> None:
        """Nothing is under way."""

    synchronize = query = record_event = wait_event = lambda self, *_: None


def _autocast(enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> Any:
    """torch.cuda.amp.autocast's own parameters, for the CPU;
    there it has no float16 where bfloat16 was not asked for.
    """
    return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def _answering(name: str, value: Any) -> Any:
    """A function of its own for each name: torch._dynamo keeps a table of torch's functions and wants no two the
    same.
    """

    def answer(*_: Any, **__: Any) -> Any:
        return value

    answer.__name__ = answer.__qualname__ = name
    return answer


def _stream_context(_: Any) -> Any:
    return contextlib.nullcontext()


def _read_as_cpu() -> None:
    device = orttrainer_options.SCHEMA["device"]
    device["id"] = dataclasses.replace(device["id"], default="cpu")
    torch.cuda.get_device_capability = _answering("get_device_capability", (7, 0))
    for name in ("manual_seed", "manual_seed_all", "synchronize", "empty_cache", "reset_peak_memory_stats", "_sleep"):
        setattr(torch.cuda, name, _answering(name, None))
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
        setattr(torch.cuda, name, _answering(name, 0))
    torch.cuda.current_device = _answering("current_device", "cpu")
    torch.cuda.current_stream = _answering("current_stream", _Stream())
    torch.cuda.Stream = _Stream
    torch.cuda.stream = _stream_context
    torch.cuda.amp.autocast = _autocast


def _without_hub() -> None:
    """bert-base-uncased without a network: transformers' defaults are its configuration;
    its weights are random ones.
    """
    try:
        import transformers
    except ImportError:
        return

    read, load = transformers.AutoConfig.from_pretrained, transformers.BertForSequenceClassification.from_pretrained

    def from_pretrained(name: str, *args: Any, **kwargs: Any) -> Any:
        if os.path.isdir(name):
            return read(name, *args, **kwargs)
        return transformers.AutoConfig.for_model(name.split("/")[-1].split("-")[0], **kwargs)

    def untrained(kind: Any, name: str, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if os.path.isdir(name):
            return load(name, *args, config=config, **kwargs)
        return kind(config if config is not None else from_pretrained(name))

    transformers.AutoConfig.from_pretrained = from_pretrained
    transformers.BertForSequenceClassification.from_pretrained = classmethod(untrained)


_read_as_cpu()
stand_ins.install()
_without_hub()
sys.modules.setdefault("wget", types.ModuleType("wget"))  # imported, and used for data sets only


def _ring(*_: Any) -> None:
    pytest.fail(f"it ran longer than {SETTINGS['seconds']} s")  # no Exception, so nothing on the way catches it


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
    """The time limit, with reminders, and the environment as it was."""
    signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, SETTINGS["seconds"], 5)
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()  # a case that fails leaves its switches set
        os.environ.update(environment)
        signal.setitimer(signal.ITIMER_REAL, 0)


_failed_parts: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    """unittest's subTest has reports of its own, before that of its case."""
    if type(report).__name__ == "SubtestReport" and report.failed:
        _failed_parts[report.nodeid] = str(report.longrepr)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """What became of a case."""
    result = (yield).get_result()
    if call.when == "setup":
        item.before = onnxtrain.stats()
    if call.when == "teardown" or call.when == "setup" and result.outcome == "passed":
        return
    before, now = item.before, onnxtrain.stats()
    text = _failed_parts.get(item.nodeid) or ("" if result.outcome == "passed" else str(result.longrepr))
    outcome = "failed" if item.nodeid in _failed_parts else result.outcome
    line = {"id": item.nodeid, "outcome": outcome, "seconds": round(call.duration, 2),
            "engine": now["engine_steps"] - before["engine_steps"],
            "fallback": now["fallback_steps"] - before["fallback_steps"],
            "reasons": now["reasons"][len(before["reasons"]):][:3],
            "error": " ".join(text[-600:].split())}
    with open(SETTINGS["out"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
