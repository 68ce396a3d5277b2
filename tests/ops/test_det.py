"""Det, of singular matrices and of none too, and its gradient."""

import pytest
import torch
from harness import Case, R, V, expect_error, run_case

CASES = [
    Case("Det", [R(2, 3, 4, 4)], torch=torch.linalg.det),
    Case("Det", [V([[1.0, 2], [2, 4]])], torch=lambda x: x[0, 0] * x[1, 1] - x[0, 1] * x[1, 0], name="singular"),
    Case("Det", [V([[0.0, 0, 0], [0, 1, 2], [0, 3, 4]])],
         torch=lambda x: (x[0] * torch.linalg.cross(x[1], x[2])).sum(), name="zero row"),
    Case("Det", [R(3, 1, 1)], torch=torch.linalg.det, name="one"),
    Case("Det", [R(2, 0, 0)], torch=torch.linalg.det, name="empty"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def test_a_matrix_that_is_not_square():
    expect_error(Case("Det", [R(2, 3)]), ValueError, "square")
