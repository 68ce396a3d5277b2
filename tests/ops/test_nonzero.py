"""Operators whose output size depends on contents: NonZero, Compress, Unique, NonMaxSuppression."""


import numpy as np
import pytest
import torch
from harness import C, Case, R, V, call, expect_error, run_case, session_of

from onnxtrain import _C

MASK = np.array([True, False, True, True, False])
DTYPES = [np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float16,
          np.float32, np.float64]


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
    *[Case("NonZero", [R(3, 4, low=0, high=2, dtype=d)], grad=False, name=np.dtype(d).name, alloc=d is np.bool_)
      for d in DTYPES],
    Case("NonZero", [V([0.0, -0.0, 1.0, float("nan")])], grad=False, name="signed zero and NaN",
         reference=lambda x: np.array([[2, 3]])),
    Case("NonZero", [np.zeros((2, 3), np.int64)], grad=False, name="none"),
    Case("NonZero", [np.ones((2, 0, 3), np.int64)], grad=False, name="empty"),
    Case("NonZero", [np.array(3)], grad=False, name="scalar", reference=lambda x: np.zeros((0, 1), np.int64)),
    Case("NonZero", [R(2, 3, 2, 2, low=0, high=2, dtype=np.int64)], grad=False, name="rank 4"),
    Case("Compress", [R(5, 3), MASK], {"axis": 0}, torch=lambda x, c: x[c]),
    Case("Compress", [R(2, 5, 3), MASK], {"axis": -2}, torch=lambda x, c: x[:, c]),
    Case("Compress", [R(2, 4), MASK], torch=lambda x, c: x.reshape(-1)[:5][c], name="flat and short"),
    Case("Compress", [R(2, 4), np.zeros(3, bool)], {"axis": 1}, torch=lambda x, c: x[:, :0], name="nothing"),
    Case("Unique", [V([2, 1, 1, 3, 4, 3], np.int64)], n_outputs=4, grad=False),
    Case("Unique", [V([2.0, 1.0, 1.0, 3.0, 4.0, 3.0])], {"sorted": 0}, n_outputs=4, grad=False),
    Case("Unique", [V([2.0, float("nan"), 1.0, float("nan")])], n_outputs=4, grad=False, name="NaN"),
    Case("Unique", [R(3, 4, low=0, high=3, dtype=np.int32)], n_outputs=4, grad=False, name="flattened"),
    Case("Unique", [V([[1, 0], [1, 0], [2, 3], [0, 9]], np.int64)], {"axis": 0}, n_outputs=4, grad=False),
    Case("Unique", [V([[[1, 1], [0, 1], [1, 1]], [[0, 1], [0, 1], [0, 1]]], np.int64)], {"axis": -2, "sorted": 0},
         n_outputs=4,
         grad=False, name="inner axis, order of appearance",  # the reference evaluator takes from axis 0
         reference=lambda x: [x[:, :2], np.array([0, 1]), np.array([0, 1, 0]), np.array([2, 1])]),
    Case("Unique", [V([2**63, 5, 2**63 + 1, 5], np.uint64)], n_outputs=4, grad=False, name="large unsigned"),
    Case("Unique", [np.zeros(0, np.int64)], n_outputs=4, grad=False, name="empty",
         reference=lambda x: [np.zeros(0, np.int64)] * 4),
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


def test_programs_are_shared_by_count():
    case = Case("Compress", [R(5, 3), MASK], {"axis": 0})
    x = torch.randn(5, 3)
    session = session_of(case, [x.numpy(), MASK])
    for mask in (MASK, MASK[::-1].copy(), np.array([True, True, True, True, False])):
        (y,), _ = call(session, [x, torch.from_numpy(mask)], bytes(2), None)
        assert torch.equal(y, x[torch.from_numpy(mask)])
    stats = session.stats()
    assert (stats["probes_built"], stats["probe_runs"], stats["programs_built"], stats["program_hits"]) == (1, 3, 2, 1)


def test_unique_has_no_gradient():
    case = Case("Unique", [V([2.0, 1.0, 2.0])])
    x = np.array([2.0, 1.0, 2.0])
    with pytest.raises(_C.UnsupportedError, match="Unique.*no gradient"):
        call(session_of(case, [x]), [torch.from_numpy(x)], b"\1", [torch.ones(2, dtype=torch.float64)])


ERRORS = [
    (Case("Compress", [R(5), np.array([1, 0, 1])]), ValueError, "bool"),
    (Case("Compress", [R(2, 2), np.array([False, False, True])], {"axis": 0}), IndexError, "out of"),
    (Case("Unique", [R(2, 2)], {"axis": 2}), ValueError, "axis 2"),
    (Case("NonMaxSuppression", [np.zeros((1, 3, 4), np.float32), np.zeros((1, 1, 2), np.float32)]), ValueError,
     "expected [batch"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
