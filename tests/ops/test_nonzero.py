"""Operators whose output size depends on contents: NonZero, Compress, Unique."""

import numpy as np
import pytest
import torch
from harness import Case, R, V, call, expect_error, run_case, session_of

from onnxtrain import _C

MASK = np.array([True, False, True, True, False])
DTYPES = [np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float16,
          np.float32, np.float64]


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
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nonzero(case):
    run_case(case)


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
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
