"""Padded batches through ORTModule on the emulated device, with the rows left out that nothing reads."""

from __future__ import annotations

import pytest
from test_emulated import run

pytest.importorskip("transformers")


def test_padded_batches_equal_those_of_all_rows(emulated):
    report = run("programs.py", emulated, "padded_batches")
    assert not report["failed"], "\n".join(f"{what}: {message}" for what, message in report["failed"])
    ran = set(report["ran"])
    assert {"VisibleKeys:cuda_visible_keys", "RowDropout:cuda_row_dropout", "UnpackRows:cuda_copy_rows"} <= ran, ran
