"""ArgMax, ArgMin and TopK take the first of equals, and NaN before all numbers, in every dtype."""

import numpy as np
import pytest
from harness import C, Case, R, V, flat, run_case

CASES = [
    *(flat(op, R(3, 4, 2), attrs={"axis": a, "keepdims": k}) for op in ("ArgMax", "ArgMin") for a in (0, 1, -1)
      for k in (0, 1)),
    *(flat("ArgMax", V([3, 1, 3, 0, 0], t), attrs={"select_last_index": s}) for s in (0, 1)
      for t in (np.int8, np.uint32, np.uint64, np.float16)),
    flat("ArgMin", V([3.0, np.nan, 0.0]), reference=lambda x: np.array([1])),
    flat("ArgMax", R(0, 3), attrs={"axis": 1, "keepdims": 0}, name="empty"),
    *(Case("TopK", [R(3, 7), C([3])], {"largest": b}, n_outputs=2, torch=lambda x, k, b=b: x.topk(3, largest=bool(b)))
      for b in (0, 1)),
    Case("TopK", [R(4, 5, 2), C([2])], {"axis": 1}, n_outputs=2, torch=lambda x, k: x.topk(2, 1)),
    Case("TopK", [R(3, 4), C([0])], n_outputs=2, torch=lambda x, k: x.topk(0), name="none"),
    Case("TopK", [R(3, 4), C([4])], n_outputs=1, torch=lambda x, k: x.topk(4)[0], name="values only"),
    flat("TopK", V([1, 2, 2, 1, 2], np.int32), C([4]), n_outputs=2,
         reference=lambda x, k: (np.array([2, 2, 2, 1], np.int32), np.array([1, 2, 4, 0]))),
    flat("TopK", V([1.0, np.nan, 2]), C([2]), n_outputs=2,
         reference=lambda x, k: (np.array([np.nan, 2], x.dtype), np.array([1, 2])), name="nan"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
