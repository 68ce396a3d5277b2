"""For every test: the sample of the sweeps, the seed of the run, and where child processes find helpers."""

import os
import time
from collections import Counter
from pathlib import Path

import pytest
from seeds import SEED, drawn_seed

SWEEP = 8  # cases of one test function from which on it is a sweep
PARTS = 3  # days in which a run of the whole suite has seen every case of every sweep
DAY = "ONNXTRAIN_TEST_DAY"
# Folders that are one sweep each: their tests take seconds and ask the same of many libraries, models and trainers.
SWEPT = ("tests/ecosystem/", "tests/models/", "tests/training/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true",
                     help=f"every case of every sweep; without it, a run of whole folders without -k takes 1 of "
                          f"{PARTS}, others each day")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(DAY, str(int(time.time()) // 86400))  # which the workers inherit
    drawn_seed()
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *map(str, config.getini("pythonpath"))]))


def _samples(config: pytest.Config) -> bool:
    chosen = config.option.full or config.option.keyword or os.environ.get("ONNXTRAIN_SLOW") == "1"
    return not chosen and any(map(Path.is_dir, _named(config)))


def _named(config: pytest.Config) -> list[Path]:
    return [Path(argument.split("::")[0]) for argument in config.args]


def _sweep(nodeid: str) -> str:
    """What a test is a case of: its folder, or else its function."""
    return next((folder for folder in SWEPT if nodeid.startswith(folder)), nodeid.split("[")[0])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _samples(config):
        return
    whole = {path.resolve() for path in _named(config) if path.is_file()}
    sweeps = [_sweep(item.nodeid) for item in items]
    cases, seen = Counter(sweeps), Counter[str]()
    kept, left = [], []
    for item, sweep in zip(items, sweeps, strict=True):
        turn = item.path in whole or cases[sweep] < SWEEP or (seen[sweep] + int(os.environ[DAY])) % PARTS == 0
        (kept if turn else left).append(item)
        seen[sweep] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _samples(config):
        terminalreporter.write_line(f"Of each sweep 1 case in {PARTS} ran; {DAY}={os.environ[DAY]} repeats this "
                                    "sample, --full runs every case.")
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"{SEED}={drawn_seed()} repeats the random cases of this run.")
