"""The emulated graph API of cuDNN: a fault that is planted in it is found, and costs no result."""

from __future__ import annotations

from test_emulated import built, run


def test_planted_faults_are_found():
    report = run("sdpa.py", built("asan", "--sanitize"), "faults")
    assert report["passed"] == 1 and not report["failed"], report["failed"]
