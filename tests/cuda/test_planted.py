"""The faults that tests plant are as many as docs/internals/decisions/cuda.md says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (.*) \| (\d+) \| (.*) \|$",
                  (ROOT / "docs/internals/decisions/cuda.md").read_text(encoding="utf-8"), re.M)
KERNELS = (ROOT / "tests/cuda/planted.cu").read_text(encoding="utf-8")


def kernels(macro: str) -> int:
    """In a list of planted.cu."""
    text = re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*)", KERNELS)[1]
    return len(re.findall(r"X\(\w+\)", text))


@pytest.mark.parametrize(("enforced", "count", "files"), ROWS, ids=[row[0][:24] for row in ROWS])
def test_counts(enforced, count, files):
    names = re.findall(r"`(\w+)\.(?:py|cu)`", files)
    found = sum(kernels("PLANTED" if "races" in enforced else "OTHERS") if name == "planted"
                else len(importlib.import_module(name).FAULTS) for name in names)
    assert names and found == int(count)


def test_every_file_with_faults_is_listed():
    have = {path.stem for path in Path(__file__).parent.glob("test_*.py")
            if re.search(r"^FAULTS = ", path.read_text(encoding="utf-8"), re.M)}
    assert have == {name for *_, files in ROWS for name in re.findall(r"`(test_\w+)\.py`", files)}
