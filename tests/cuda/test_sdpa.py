"""Attention by cuDNN's graphs, which an emulated library computes operation by operation: outputs and gradients."""

from __future__ import annotations

from test_emulated import run, sanitized


def test_graphs_agree_with_eager_and_the_cpu():
    report = run("sdpa.py", sanitized())
    assert report["passed"] == 6 and not report["failed"], report["failed"]
