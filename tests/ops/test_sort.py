"""Sorts of more than a few items: Unique, and NonMaxSuppression of boxes that do not overlap, whose rows are then in
the order of the scores.
"""

import numpy as np
import pytest
from harness import C, Case, R, run_case


def by_score(scores):
    """(batch, class, box) by falling score; equal scores by box."""
    return np.array([[b, c, box] for b, c in np.ndindex(scores.shape[:2])
                     for box in np.argsort(-scores[b, c], kind="stable")])


N = 150
BOXES = np.array([[[i, 0, i + 0.9, 1] for i in range(N)]] * 2, np.float32)
SCORES = np.random.default_rng(0).integers(0, 40, (2, 3, N)).astype(np.float32) / 40
CASES = [
    *(Case("Unique", [R(300, low=-20, high=20, dtype=np.int64)], {"sorted": order}, n_outputs=4, grad=False,
           alloc=False, name=f"sorted {order}") for order in (0, 1)),
    Case("Unique", [R(17, 30, low=-500, high=500, dtype=np.int16)], n_outputs=4, grad=False, alloc=False,
         name="matrix"),
    Case("Unique", [R(130, 2, 2, low=0, high=3, dtype=np.int32)], {"axis": 0}, n_outputs=4, grad=False, alloc=False,
         name="items of four"),
    Case("NonMaxSuppression", [BOXES, SCORES, C([N])], grad=False, alloc=False, name="order",
         reference=lambda b, s, m: by_score(s)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_order(case):
    run_case(case)
