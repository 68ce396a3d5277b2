"""The examples of docs/ortmodule.md run, one after another, as a reader would run them."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ortmodule.md"


def test_examples():
    found = {"__name__": "docs"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), found)
