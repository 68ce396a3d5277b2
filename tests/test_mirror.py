"""Every source file has a test file of its name, or stands in unmirrored.txt, which must not grow; no test edits
sys.path; slow.txt names tests that exist.

A source file `csrc/ops/loss/ctc.c` or `onnxtrain/ortmodule/_debug.py` has its tests in a `test_ctc.py`, a
`test_debug.py`, or for layers that need no Python in a `tests/unit/ctc.c`. docs/internals/testing.md says which folder
of tests holds the files of the list. It shrinks: a line whose test exists now must go.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
LIST = TESTS / "unmirrored.txt"
# A test of the documentation hands sys.path to a child process.
MAY_NAME_THE_PATH = {"tests/test_docs.py", "tests/test_mirror.py"}


def sources() -> list[Path]:
    """C, CUDA and Python files that hold code; headers and kernels' loops belong to the file that includes them."""
    found = [path for folder in ("csrc", "cuda", "onnxtrain") for path in (ROOT / folder).rglob("*")
             if path.suffix in (".c", ".cu", ".py")]
    return [path for path in found if path.name != "__init__.py" and not path.name.endswith(".inc.c")]


def unmirrored() -> set[str]:
    tests = {path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")}
    tests |= {path.stem for path in (TESTS / "unit").glob("*.c")}
    return {path.relative_to(ROOT).as_posix() for path in sources() if path.stem.lstrip("_") not in tests}


def listed() -> list[str]:
    return [line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def test_new_files_have_tests_of_their_name():
    missing = sorted(unmirrored() - set(listed()))
    assert not missing, f"write a test_<name>.py for {missing}"


def test_the_list_shrinks():
    assert listed() == sorted(set(listed()))
    done = sorted(set(listed()) - unmirrored())
    assert not done, f"these have a test of their name, or are gone; remove them from {LIST.name}: {done}"


def test_slow_tests_exist():
    """A name that has changed would be run every day."""
    gone = []
    for line in (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines():
        file, function = line.split("::")
        path = ROOT / file
        if not path.exists() or f"def {function}(" not in path.read_text(encoding="utf-8"):
            gone.append(line)
    assert not gone


def test_tests_leave_the_path_alone():
    """pyproject.toml and conftest.py say where tests and their child processes find helpers."""
    wrong = [path.relative_to(ROOT).as_posix() for path in sorted(TESTS.rglob("test_*.py"))
             if re.search(r"\bsys\.path\b", path.read_text(encoding="utf-8"))]
    assert set(wrong) <= MAY_NAME_THE_PATH
