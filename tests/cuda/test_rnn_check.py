"""ops/rnn_check.c: a layer that the library computes otherwise, or refuses, is found before it is used."""

from __future__ import annotations

from test_emulated import built, run


def test_faults_of_the_library_cost_no_result():
    report = run("rnn.py", built("asan", "--sanitize"), "faults")
    assert report["passed"] == 1 and not report["failed"], report["failed"]
