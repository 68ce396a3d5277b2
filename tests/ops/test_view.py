"""Operators that rename or reshape share the storage of their input."""

import numpy as np
import pytest
from harness import C, Case, R, V, expect_error, flat, of_run_time_inputs, run_case

CASES = [
    Case("Identity", [R(2, 3)], torch=lambda x: x + 0),
    Case("Reshape", [R(2, 3, 4), C([4, 6])], torch=lambda x: x.reshape(4, 6)),
    Case("Reshape", [R(2, 3, 4), C([0, -1])], torch=lambda x: x.reshape(2, 12), name="0 and -1"),
    Case("Reshape", [R(0, 3), C([0, 5, 3])], {"allowzero": 1}, torch=lambda x: x.reshape(0, 5, 3), name="allowzero"),
    Case("Reshape", [R(1), C([], np.int64)], torch=lambda x: x.reshape(()), name="to a scalar"),
    Case("Flatten", [R(2, 3, 4)], {"axis": 2}, torch=lambda x: x.reshape(6, 4)),
    Case("Flatten", [R(2, 3, 4)], {"axis": -1}, torch=lambda x: x.reshape(6, 4), name="negative"),
    Case("Flatten", [R(2, 3)], {"axis": 0}, torch=lambda x: x.reshape(1, 6), name="axis 0"),
    Case("Squeeze", [R(1, 3, 1), C([0])], torch=lambda x: x.squeeze(0)),
    Case("Squeeze", [R(1, 3, 1)], torch=lambda x: x.squeeze(), name="all"),
    Case("Squeeze", [R(1, 3, 1)], {"axes": [-1]}, opset=11, torch=lambda x: x.squeeze(-1), name="attribute"),
    Case("Unsqueeze", [R(3, 2), C([0, -1])], torch=lambda x: x[None, :, :, None]),
    Case("Unsqueeze", [R(3)], {"axes": [1]}, opset=11, torch=lambda x: x[:, None], name="attribute"),
    flat("Shape", R(2, 3, 4)),
    flat("Shape", R(2, 3, 4), attrs={"start": -2, "end": 10}, name="part"),
    flat("Size", R(2, 3, 4)),
]
CASES = [of_run_time_inputs(case) for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout(case):
    run_case(case)


ERRORS = [
    (flat("Reshape", R(2, 3), C([4, -1])), ValueError, "cannot fill"),
    (flat("Reshape", R(2, 3), C([-1, -1])), ValueError, "more than one -1"),
    (flat("Reshape", R(2, 3), V([5], np.int64)), ValueError, "cannot be seen as"),
    (flat("Squeeze", R(2, 3), C([0])), ValueError, "not 1"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
