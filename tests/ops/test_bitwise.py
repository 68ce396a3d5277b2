"""Bitwise operators and shifts take every integer type."""

import numpy as np
import pytest
from harness import Case, R, V, run_case

CASES = [
    *(Case(op, [R(2, 3, dtype=t, low=0, high=100), R(3, dtype=t, low=0, high=100)], grad=False)
      for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor") for t in (np.int8, np.int16, np.uint32, np.int64)),
    Case("BitwiseNot", [R(2, 3, dtype=np.int16, low=-50, high=50)], grad=False),
    *(Case("BitShift", [R(2, 3, dtype=t, low=0, high=100), R(2, 1, dtype=t, low=0, high=8)], {"direction": d},
           grad=False)
      for t in (np.uint8, np.uint16, np.uint32, np.uint64) for d in ("LEFT", "RIGHT")),
    Case("BitShift", [V([-8, -1, 100, -5], np.int8), V([1, 9, -1, 2], np.int8)], {"direction": "RIGHT"}, grad=False,
         reference=lambda x, y: np.array([-4, -1, 0, -2], np.int8), name="signed"),
    Case("BitShift", [V([1, 2, 255], np.uint8), V([8, 200, 1], np.uint8)], {"direction": "LEFT"}, grad=False,
         reference=lambda x, y: np.array([0, 0, 254], np.uint8), name="by the width and more"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
