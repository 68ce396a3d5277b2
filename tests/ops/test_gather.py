"""Gather takes entries along an axis, counts from the end, and names an index that is out of range."""

import numpy as np
import pytest
from harness import C, Case, R, V, expect_error, run_case

CASES = [
    Case("Gather", [R(5, 3), V([[0, 4], [-1, 2]], np.int64)], torch=lambda x, i: x[i]),
    Case("Gather", [R(2, 5, 3), V([1, 1, 4], np.int32)], {"axis": 1}, torch=lambda x, i: x[:, i.long()],
         name="repeated"),
    Case("Gather", [R(5), V(3, np.int64)], torch=lambda x, i: x[i], name="scalar"),
    Case("Gather", [R(5, 3), V(np.zeros((0,)), np.int64)], torch=lambda x, i: x[i], name="no index"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reduce(case):
    run_case(case)


@pytest.mark.parametrize("index", [5, -6])
def test_gather_out_of_range(index):
    expect_error(Case("Gather", [R(5, 3), V([0, index], np.int64)]), IndexError, f"index {index} at position 1")


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_in_range(dtype):
    limit = C(3, np.int64)
    for values, below in (([0, 2, 1], limit), ([0, 2, 9], C(-1, np.int64))):
        run_case(Case("InRange", [V(values, dtype), below], domain="ai.onnxtrain", torch=lambda i, n: i.clone()))
    for values, position in (([0, 3, 1], 1), ([0, 0, -1], 2)):
        expect_error(Case("InRange", [V(values, dtype), limit], domain="ai.onnxtrain"), IndexError,
                     f"index {values[position]} at position {position} of")
    two = Case("InRange", [V([0], dtype), V([1, 2], np.int64)], domain="ai.onnxtrain")
    expect_error(two, ValueError, "must be one int64")
