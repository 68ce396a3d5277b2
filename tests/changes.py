"""Which test files a change touches: `pytest --changed BASE` runs these whole, beside the tree's sample."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Where the tests of a source file without a test file of its name are; the first folder that fits.
FAMILIES = {
    "csrc/ops": "tests/ops", "csrc/passes": "tests/graph", "csrc/run": "tests/graph", "csrc/onnx": "tests/onnx",
    "csrc/optim": "tests/optim", "csrc/py/optim": "tests/optim", "csrc/dist": "tests/training",
    "csrc/base": "tests/unit", "csrc/ir": "tests/unit", "csrc/plan": "tests/unit", "csrc/simd": "tests/unit",
    "csrc/device": "tests/cuda", "cuda": "tests/cuda", "csrc/py": "tests/ortmodule",
    "onnxtrain/_export": "tests/export", "onnxtrain/ortmodule": "tests/ortmodule", "onnxtrain/optim": "tests/optim",
    "onnxtrain/training": "tests/training", "onnxtrain/integrations": "tests/ecosystem",
    "onnxtrain/finetune": "tests/finetune",
    "onnxtrain/utils": "tests/utils", "onnxtrain": "tests/ortmodule",
}


def changed_since(base: str) -> list[str]:
    """Paths of files that differ from the commit `base`, committed or not."""
    done = subprocess.run(["git", "-C", str(ROOT), "diff", "--name-only", base, "--"], capture_output=True, text=True,
                          check=True)
    return done.stdout.splitlines()


def touched(changed: Iterable[str], tests: Iterable[str]) -> set[str]:
    """Of the paths `tests` those whose subject has changed.

    A test file that has changed itself; one with the name of a changed file (test_mirror.py); of a changed file without
    a test of its name, those with the name of a file in its folder of operators, or else those of its folder.
    """
    tests = set(tests)
    named: dict[str, set[str]] = {}
    for test in tests:
        named.setdefault(Path(test).stem.removeprefix("test_"), set()).add(test)
    found = set()
    for path in changed:
        stem = Path(path).stem.removesuffix(".inc").lstrip("_")
        if path in tests:
            found.add(path)
        elif path.startswith("tests/unit/"):
            found |= named.get("unit", set())
        elif path.startswith(("csrc/", "cuda/", "onnxtrain/")):
            found |= named.get(stem, set()) or _of_family(path, named)
    return found


def _of_family(path: str, named: dict[str, set[str]]) -> set[str]:
    if path.startswith("csrc/ops/"):
        beside = {source.stem for source in (ROOT / path).parent.glob("*.c")}
        if of_operators := set().union(*(named.get(stem, set()) for stem in beside)):
            return of_operators
    folder = next((tests for source, tests in FAMILIES.items() if path.startswith(source)), None)
    if folder is None:  # csrc/README.md
        return set()
    return {test for tests in named.values() for test in tests if test.startswith(f"{folder}/")}
