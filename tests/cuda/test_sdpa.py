"""Attention by cuDNN's graphs, which an emulated library computes operation by operation: outputs and gradients."""

from __future__ import annotations

from test_emulated import built, run


def test_graphs_agree_with_eager_and_the_cpu():
    report = run("sdpa.py", built("asan", "--sanitize"))
    assert report["passed"] == 7 and not report["failed"], report["failed"]
