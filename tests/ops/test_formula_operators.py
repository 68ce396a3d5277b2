"""Pad in all modes and ReverseSequence against torch and NumPy; refusals of operators that are built from others."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import OURS, C, Case, R, V, expect_error, flat, run_case


def pad(pads, mode="constant", value=0.0):
    """torch's pads come from the last dim; the others are in the order of ONNX."""
    n = len(pads) // 2
    turned = [p for d in reversed(range(n)) for p in (pads[d], pads[n + d])]
    if mode == "constant":
        return lambda x, *_: F.pad(x, turned, value=value)
    return lambda x, *_: F.pad(x[None, None], turned, mode=mode)[0, 0]


def numpy_pad(pads, mode):
    n = len(pads) // 2
    return lambda x, *_: np.pad(x, [(pads[d], pads[n + d]) for d in range(n)], mode=mode)


PADS = [([1, 2, 0, 3], "reflect"), ([2, 1, 1, 0], "edge"), ([2, 3, 3, 1], "wrap")]
TORCH_MODE = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}

CASES = [
    *(Case("Pad", [R(3, 4), C(p)], {"mode": m}, torch=pad(p, TORCH_MODE[m]), reference=numpy_pad(p, m))
      for p, m in PADS),
    Case("Pad", [R(3, 4), C([1, 2, 0, 3])], torch=pad([1, 2, 0, 3])),
    Case("Pad", [R(3, 4), C([1, -1, -2, 3])], torch=pad([1, -1, -2, 3]),
         reference=lambda x, p: F.pad(torch.tensor(x), (-1, 3, 1, -2)).numpy(), name="negative"),
    Case("Pad", [R(3, 4), C([1, 2]), V(0.5), C([-1])],
         torch=lambda x, p, v, a: torch.cat([v.expand(3, 1), x, v.expand(3, 2)], 1), name="value and axes"),
    Case("Pad", [R(2, 3)], {"pads": [0, 1, 2, 0], "value": 1.5}, opset=2, torch=pad([0, 1, 2, 0], value=1.5)),
    Case("Pad", [R(0, 3), C([1, 0, 1, 0])], torch=pad([1, 0, 1, 0]), name="empty"),
    Case("Pad", [R(3), C([5, 6])], {"mode": "reflect"}, fd=True, name="several times",
         reference=lambda x, p: np.pad(x, (5, 6), mode="reflect")),
    Case("Pad", [R(), C([], np.int64)], torch=lambda x, p: x + 0, reference=lambda x, p: x, name="scalar"),
    flat("Pad", R(2, 3, dtype=np.int16, low=-9, high=9), C([0, 1, 0, 1]), C(7, np.int16)),
    Case("ReverseSequence", [R(4, 3, 2), V([4, 0, 2], np.int64)], torch=lambda x, n: torch.stack(
        [torch.cat([x[:k, b].flip(0), x[k:, b]]) for b, k in enumerate(n.tolist())], 1)),
    Case("ReverseSequence", [R(2, 3), V([1, 3], np.int64)], {"batch_axis": 0, "time_axis": 1},
         torch=lambda x, n: torch.stack(
[torch.cat([x[b, :k].flip(0), x[b, k:]]) for b, k in enumerate(n.tolist())])),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def test_errors():
    expect_error(Case("SearchSorted", [R(2, 3), R(3, 4)], domain=OURS), ValueError,
                 "must be one row, or one row for each row of values")
    expect_error(Case("SearchSorted", [R(3), V([1], np.int64)], domain=OURS), TypeError, "the sorted rows are")
    expect_error(Case("TopK", [R(3), C([4])]), ValueError, "k is 4")
    expect_error(Case("Pad", [R(3), C([1])]), ValueError, "1 pads")
    expect_error(Case("Pad", [R(3), C([-2, -2])]), ValueError, "take more")
    expect_error(Case("Pad", [R(3), C([1, 1])], {"mode": "mirror"}), NotImplementedError, "mirror")
    expect_error(Case("ReverseSequence", [R(3, 1), V([4], np.int64)]), IndexError, "length 4")
    expect_error(Case("Tile", [R(3), C([2, 2])]), ValueError, "2 repeats")
    expect_error(Case("ArgMax", [R(0, 3)]), ValueError, "empty")
    expect_error(Case("OneHot", [V([0], np.int64), C(0), R(2)]), ValueError, "depth")
