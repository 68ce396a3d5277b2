"""The ONNX backend suite through onnxtrain.backend, held both ways against not_passed.txt: a test that is not listed
must pass, and a listed one must not, so that the list neither hides a defect nor grows stale."""

from __future__ import annotations

import collections

import pytest
from suite import cases, not_passed, run_one

LISTED = not_passed()
_counts: dict[str, collections.Counter] = {}


@pytest.mark.parametrize("name", sorted(cases()))
def test_suite(name):
    kind, function = cases()[name]
    message = run_one(function)
    _counts.setdefault(kind, collections.Counter())["passed" if message is None else "not passed"] += 1
    if name in LISTED:
        fails = message is not None or "on some processors" in LISTED[name]
        assert fails, f"{name} passes: take it off not_passed.txt"
    else:
        assert message is None, message


def test_the_list_names_existing_tests():
    assert not sorted(set(LISTED) - set(cases()))


def test_counts(capsys):
    with capsys.disabled():
        for kind, count in sorted(_counts.items()):
            print(f"\nonnx backend suite, {kind}: {count['passed']} of {sum(count.values())} pass", end="")
    assert _counts
