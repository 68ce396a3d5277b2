"""NonMaxSuppression keeps the boxes that set operations on an overlap matrix keep."""

import numpy as np
import pytest
import torch
from harness import C, Case, call, expect_error, run_case, session_of


def boxes_of(n, seed=0):
    rng = np.random.default_rng(seed)
    corner, size = rng.uniform(0, 10, (2, n, 2)), rng.uniform(1, 5, (2, n, 2))
    return np.concatenate([corner, corner + size], 2).astype(np.float32)


def nms_by_torch(boxes, scores, most, iou, score):
    """A second implementation, by set operations on an overlap matrix."""
    rows = []
    for b in range(scores.shape[0]):
        box = torch.from_numpy(boxes[b]).double()
        low, high = torch.minimum(box[:, :2], box[:, 2:]), torch.maximum(box[:, :2], box[:, 2:])
        common = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).clamp(min=0).prod(-1)
        area = (high - low).prod(-1)
        overlaps = common / (area[:, None] + area - common) > iou
        for c in range(scores.shape[1]):
            left, kept = [int(i) for i in np.argsort(-scores[b, c], kind="stable") if scores[b, c, i] > score], []
            while left and len(kept) < most:
                kept.append(left[0])
                left = [i for i in left[1:] if not overlaps[kept[-1], i]]
            rows += [[b, c, k] for k in kept]
    return np.array(rows, np.int64).reshape(-1, 3)


CASES = [
    *[Case("NonMaxSuppression", [boxes_of(20), np.random.default_rng(1).uniform(0, 1, (2, 3, 20)).astype(np.float32),
                                 C([most]), C([iou], np.float32), C([score], np.float32)], grad=False,
           name=f"{most} {iou} {score}", reference=lambda b, s, m, i, t: nms_by_torch(b, s, m[0], i[0], t[0]),
           alloc=most == 3)
      for most, iou, score in ((3, 0.3, 0.2), (20, 0.5, 0.0), (20, 0.1, 0.9), (0, 0.5, 0.5))],
    Case("NonMaxSuppression", [np.array([[[i, i, i + 1, i + 1] for i in range(4)]], np.float32),
                               np.array([[[np.nan, 0.5, np.nan, 0.7]]], np.float32), C([4])], grad=False,
         name="NaN is last", reference=lambda b, s, m: np.array([[0, 0, i] for i in (3, 1, 0, 2)]), alloc=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nonzero(case):
    run_case(case)


def test_corners_in_any_order_and_centres():
    boxes, scores = boxes_of(12), np.random.default_rng(2).uniform(0, 1, (2, 1, 12)).astype(np.float32)
    limits = [C([12]), C([0.3], np.float32), C([0.1], np.float32)]

    def run(given, **attrs):
        case = Case("NonMaxSuppression", [given, scores, *limits], attrs)
        arrays = [given, scores, *(limit.make(0) for limit in limits)]
        return call(session_of(case, arrays), [torch.from_numpy(given), torch.from_numpy(scores)], bytes(2), None)[0][0]

    expected = run(boxes)
    assert torch.equal(run(np.ascontiguousarray(boxes[..., [2, 3, 0, 1]])), expected)
    centred = np.concatenate([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], 2)
    assert torch.equal(run(centred, center_point_box=1), expected)


ERRORS = [
    (Case("NonMaxSuppression", [np.zeros((1, 3, 4), np.float32), np.zeros((1, 1, 2), np.float32)]), ValueError,
     "expected [batch"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
