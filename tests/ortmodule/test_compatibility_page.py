"""The examples of docs/compatibility.md run, one after another, as a reader would run them."""

import re
from pathlib import Path

from onnxtrain._export import gradients

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


def test_examples(monkeypatch):
    monkeypatch.setattr(gradients, "REGISTERED", {})
    found = {"__name__": "docs"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), found)
