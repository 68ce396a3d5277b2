"""Range, ConstantOfShape and Trilu make the values that their shapes and numbers ask for."""

import numpy as np
import pytest
import torch
from harness import C, Case, R, expect_error, flat, of_run_time_inputs, run_case

CASES = [
    Case("Trilu", [R(4, 5)], torch=torch.triu),
    Case("Trilu", [R(2, 5, 4), C(-1)], {"upper": 0}, torch=lambda x: torch.tril(x, -1)),
    Case("Trilu", [R(3, 3), C(7)], torch=lambda x: torch.triu(x, 7), name="beyond"),
    Case("Trilu", [R(3, 3), C(2**63 - 1)], {"upper": 0}, torch=lambda x: torch.tril(x, 9), name="far beyond"),
    flat("Range", C(3), C(11), C(2)),
    flat("Range", C(5, np.float32), C(-1, np.float32), C(-1.5, np.float32), name="float"),
    flat("ConstantOfShape", C([2, 3])),
]
CASES = [of_run_time_inputs(case) for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout(case):
    run_case(case)


ERRORS = [
    (flat("Trilu", R(2, 3), C(True, bool)), TypeError, "k is bool"),
    (flat("Range", C(3), C(11), C(2, np.float32)), TypeError, "input 2 is float, start is int64"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
