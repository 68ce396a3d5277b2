"""For every test: the sample of its sweep, the seed of the run, and where child processes find helpers."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from changes import ROOT, changed_since, touched
from seeds import SEED, drawn_seed, of_tree

SWEEP = 8  # cases of one test function from which on it is a sweep
SAMPLE = "ONNXTRAIN_TEST_SAMPLE"  # a number: which cases of each sweep a run takes
PARTS = "ONNXTRAIN_TEST_PARTS"  # of how many cases of a sweep a run of whole folders takes one
USUAL_PARTS = "28"
# Folders that are one sweep each: their tests take seconds and ask the same of many libraries, models and trainers.
SWEPT = ("tests/cuda/", "tests/ecosystem/", "tests/finetune/", "tests/models/", "tests/training/")
SLOW = Path(__file__).with_name("slow.txt")  # test functions that took more than SECONDS, which are one sweep
SECONDS = 3.5


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """What Dynamo has captured is forgotten before and after a test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def kernels_by_rule() -> Iterator[None]:
    """Kernels of products do not compete, in sessions and in modules: two programs of one graph have the same bits and
    plan.
    """
    import torch

    from onnxtrain import _C

    torch.use_deterministic_algorithms(True)  # which a module tells the core
    _C.set_deterministic(True)
    yield
    torch.use_deterministic_algorithms(False)
    _C.set_deterministic(False)


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that counts lines must not depend on how fast the machine exports."""
    from onnxtrain.ortmodule import _announce

    monkeypatch.setattr(_announce, "PROGRESS", (3600.0,))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true",
                     help=f"every case of every sweep; without it, a run of whole folders without -k takes 1 of "
                          f"{PARTS} ({USUAL_PARTS}), others for each commit")
    parser.addoption("--changed", metavar="BASE",
                     help="beside the sample, every case of the tests of what has changed since that commit")
    parser.addoption("--one-in", type=int, default=1, help="of the tests that would run, 1 in so many, by the same number")
    parser.addoption("--without-wanted", action="store_true",
                     help="nothing inside PyTorch is replaced that results do not depend on (onnxtrain/_torch.py)")
    parser.addoption("--find-slow", action="store_true",
                     help=f"afterwards, write {SLOW.name}: the tests of this run of more than {SECONDS} s, and what was "
                          "known of others")


def _leave_torch_alone() -> None:
    """As with a release of torch that has another source of each function which onnxtrain would like to replace."""
    from onnxtrain import _torch

    _torch.TABLE.update({short: name._replace(known=()) for short, name in _torch.TABLE.items()
                         if name.how != "read" and not name.needed})


def pytest_configure(config: pytest.Config) -> None:
    if config.option.without_wanted:
        _leave_torch_alone()
    os.environ.setdefault(SAMPLE, str(of_tree()))  # which the workers inherit
    os.environ.setdefault(PARTS, USUAL_PARTS)
    os.environ.setdefault("ORTMODULE_CACHE_DIR", "")  # tests must not read what others exported
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *map(str, config.getini("pythonpath"))]))


def _samples(config: pytest.Config) -> bool:
    chosen = config.option.full or config.option.keyword or os.environ.get("ONNXTRAIN_SLOW") == "1"
    return not chosen and any(map(Path.is_dir, _named(config)))


def _named(config: pytest.Config) -> list[Path]:
    return [Path(argument.split("::")[0]) for argument in config.args]


def _sweep(nodeid: str, slow: set[str]) -> str:
    """What a test is a case of: its folder, the slow tests, or else its function."""
    function = nodeid.split("[")[0]
    return next((folder for folder in SWEPT if nodeid.startswith(folder)), SLOW.name if function in slow else function)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _samples(config):
        return
    whole = {path.resolve() for path in _named(config) if path.is_file()}
    if base := config.option.changed:
        files = {item.path.relative_to(ROOT).as_posix() for item in items}
        whole |= {ROOT / path for path in touched(changed_since(base), files)}
    slow = set(SLOW.read_text().splitlines())
    sweeps = [_sweep(item.nodeid, slow) for item in items]
    cases, seen = Counter(sweeps), Counter[str]()
    sample, parts = int(os.environ[SAMPLE]), int(os.environ[PARTS])
    kept, left = [], []
    for item, sweep in zip(items, sweeps, strict=True):
        turn = item.path in whole or cases[sweep] < SWEEP or (seen[sweep] + sample) % min(parts, cases[sweep]) == 0
        (kept if turn else left).append(item)
        seen[sweep] += 1
    share = config.option.one_in
    left += [item for i, item in enumerate(kept) if (i + sample) % share]
    items[:] = [item for i, item in enumerate(kept) if not (i + sample) % share]
    config.hook.pytest_deselected(items=left)


def _write_slow(terminalreporter: pytest.TerminalReporter) -> None:
    """Fixtures of a file count for the test that was the first to need them."""
    took: dict[str, Counter[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took.setdefault(report.nodeid.split("[")[0], Counter())[report.nodeid] += report.duration
    found = {function for function, cases in took.items()
             if max(cases.values()) > SECONDS and not function.startswith(SWEPT)}
    kept = {function for function in SLOW.read_text().splitlines() if function not in took}
    SLOW.write_text("".join(f"{function}\n" for function in sorted(found | kept)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _samples(config):
        terminalreporter.write_line(f"Of each sweep 1 case in {os.environ[PARTS]} ran, by HEAD's tree; "
                                    f"{SAMPLE}={os.environ[SAMPLE]} repeats this sample, --full runs every case.")
    if config.option.find_slow:
        _write_slow(terminalreporter)
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"{SEED}={drawn_seed()} repeats the random cases of this run.")
