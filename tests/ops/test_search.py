"""SearchSorted finds the positions that torch.searchsorted finds."""

import numpy as np
import pytest
import torch
from harness import OURS, V, flat, run_case

SORTED = V([-1.0, 0.0, 0.0, 1.0, np.nan]), V([[-2.0, -1.0, -0.0, 0.5], [1.0, 2.0, np.nan, np.inf]])
CASES = [flat("SearchSorted", *operands, attrs={"right": right}, domain=OURS, name=name,
               reference=lambda rows, x, right=right: torch.searchsorted(*map(torch.from_numpy, (rows, x)),
                                                                         right=bool(right)).numpy())
          for right in (0, 1) for name, operands in {
              "one row": SORTED, "rows": (V([[1.0, 2.0, 2.0], [-3.0, 0.0, 9.0]]), V([[2.0, 0.0], [9.0, -9.0]])),
              "integers": (V([1, 3, 3, 5], np.int64), V([0, 3, 9], np.int64)), "none": (V(np.zeros(0)), V([1.0])),
              "int32": (V([1, 3, 3, 5], np.int32), V(3, np.int32))}.items()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
