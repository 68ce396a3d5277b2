"""TorchTopK chooses among equals as torch does, whose algorithms are libstdc++'s."""

import numpy as np
import pytest
import torch
from harness import C, Case, R, V, flat, run_case

CASES = [
    *(flat("TorchTopK", R(5, 300, 2, low=0, high=high, dtype=dtype), C([k]), n_outputs=2, domain="ai.onnxtrain",
           attrs={"axis": 1, "largest": largest, "sorted": ordered}, alloc=False, name=f"of {high} numbers",
           reference=lambda x, k, largest=largest, ordered=ordered: tuple(
               y.numpy() for y in torch.from_numpy(x).topk(int(k[0]), 1, bool(largest), bool(ordered))))
      for dtype in (np.float32, np.float64, np.int32, np.int64) for high in (1, 3, 1000)
      for k, largest, ordered in ((0, 1, 1), (1, 1, 1), (4, 0, 1), (5, 1, 1), (40, 1, 0), (200, 0, 1), (300, 1, 1))),
    Case("TorchTopK", [V([[0.0, -0.0, np.nan, 1, np.nan, -0.0, np.inf]] * 2), C([4])], n_outputs=2,
         domain="ai.onnxtrain", torch=lambda x, k: x.topk(4), fd=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
