"""Transpose, Expand, Slice, Split and Concat move elements as torch does."""

import numpy as np
import pytest
import torch
from harness import C, Case, R, expect_error, flat, of_run_time_inputs, run_case

CASES = [
    Case("Transpose", [R(2, 3)], torch=lambda x: x.T),
    Case("Transpose", [R(2, 3, 4, 5)], {"perm": [0, 2, 1, 3]}, torch=lambda x: x.permute(0, 2, 1, 3)),
    Case("Transpose", [R(2, 3, 4, 5)], {"perm": [3, 1, 0, 2]}, torch=lambda x: x.permute(3, 1, 0, 2), name="crossed"),
    Case("Transpose", [R(2, 3, 4)], {"perm": [0, 1, 2]}, torch=lambda x: x.clone(), name="of nothing"),
    Case("Transpose", [R(37, 53)], torch=lambda x: x.T, name="tiles", alloc=False),
    *[Case("Transpose", [R(*shape)], {"perm": perm}, torch=lambda x, perm=perm: x.permute(perm), alloc=False)
      for shape, perm in [((2, 70), [1, 0]), ((70, 2), [1, 0]), ((3, 41), [1, 0]), ((2, 19, 21), [0, 2, 1]),
                          ((21, 18, 5), [2, 0, 1]), ((4, 33, 3), [2, 1, 0])]],
    *[flat("Transpose", R(21, 34, low=0, high=100, dtype=dtype)) for dtype in (np.uint8, np.int16, np.int32, np.int64)],
    *[Case("Concat", [R(9, n), R(9, 3)], {"axis": 1}, torch=lambda x, y: torch.cat([x, y], 1), alloc=False,
           name=f"rows of {n}") for n in (1, 2, 4, 5, 7, 11, 16, 17)],
    Case("Transpose", [R(3, 0, 2)], {"perm": [2, 0, 1]}, torch=lambda x: x.permute(2, 0, 1), name="empty"),
    flat("Transpose", R(3, 5, dtype=np.bool_)),
    Case("Expand", [R(3, 1), C([2, 1, 4])], torch=lambda x: x.expand(2, 3, 4)),
    Case("Expand", [R(), C([2, 2])], torch=lambda x: x.expand(2, 2), name="scalar"),
    Case("Expand", [R(3, 4), C([1])], torch=lambda x: x + 0, name="no-op"),
    Case("Slice", [R(5, 6), C([1]), C([4])], torch=lambda x: x[1:4]),
    Case("Slice", [R(5, 6), C([-3]), C([2**62]), C([1]), C([2])], torch=lambda x: x[:, -3::2], name="step"),
    Case("Slice", [R(5, 6), C([4]), C([-100]), C([0]), C([-2])], torch=lambda x: x[[4, 2, 0]], name="reversed"),
    *(Case("Slice", [R(3, n, dtype=dtype), C([n]), C([-n - 1]), C([1]), C([-1])], torch=lambda x: x.flip(1),
           dtypes=(dtype,), name=f"mirrored-{n}") for n in (1, 4, 5, 11) for dtype in (np.float32, np.float64)),
    Case("Slice", [R(2, 3, 5), C([9, 9, 9]), C([-9, -9, -9]), C([0, 1, 2]), C([-1, -1, -1])],
         torch=lambda x: x.flip(0, 1, 2), name="mirrored whole"),
    Case("Slice", [R(5, 6), C([1, 2]), C([3, 5]), C([1, 0])], torch=lambda x: x[2:5, 1:3], name="two axes"),
    Case("Slice", [R(5), C([3]), C([3])], torch=lambda x: x[3:3], name="empty"),
    Case("Slice", [R(5, 2)], {"starts": [1], "ends": [-1]}, opset=9, torch=lambda x: x[1:-1], name="attributes"),
    Case("Split", [R(6, 4)], {"num_outputs": 2}, n_outputs=2, torch=lambda x: x.split(3)),
    Case("Split", [R(7, 2)], {"num_outputs": 3}, n_outputs=3, torch=lambda x: x.split(3), name="uneven"),
    Case("Split", [R(2, 6), C([1, 3, 2])], {"axis": 1}, n_outputs=3, torch=lambda x: x.split([1, 3, 2], 1)),
    Case("Split", [R(4, 2)], {"split": [1, 3]}, n_outputs=2, opset=11, torch=lambda x: x.split([1, 3]),
         name="attribute"),
    Case("Concat", [R(2, 3), R(4, 3)], {"axis": 0}, torch=lambda x, y: torch.cat([x, y])),
    Case("Concat", [R(2, 3), R(2, 1), R(2, 0)], {"axis": -1}, torch=lambda *x: torch.cat(x, -1)),
    Case("Concat", [R(3)], {"axis": 0}, torch=lambda x: x + 0, name="one"),
]


CASES = [of_run_time_inputs(case) for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout(case):
    run_case(case)


ERRORS = [
    (flat("Transpose", R(2, 3), attrs={"perm": [0, 0]}), ValueError, "permutation"),
    (flat("Slice", R(2, 3), C([0]), C([1]), C([5])), ValueError, "axis 5"),
    (flat("Slice", R(2, 3), C([0]), C([1]), C([0]), C([0])), ValueError, "step"),
    (flat("Concat", R(2, 3), R(3, 2), attrs={"axis": 0}), ValueError, "does not join"),
    (flat("Split", R(5), C([2, 2]), n_outputs=2), ValueError, "add up to 4"),
    (flat("Split", R(2), C([2**59, 2, *[2**59] * 31]), n_outputs=33), ValueError, "more than the 2"),  # 2 mod 2^64
    (flat("Expand", R(2, 3), C([4, 3])), ValueError, "broadcast"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
