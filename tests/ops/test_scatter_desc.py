"""Every reduction of ScatterElements and ScatterND has the values and gradients of torch.scatter_reduce."""

import numpy as np
import pytest
from harness import Case, R, V, run_case
from test_scatter import INDEX, along
from test_scatter_nd import at_tuples

REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
CASES = [
    *(Case("ScatterElements", [R(4, 3), V(INDEX, np.int64), R(3, 3)], {"reduction": ours}, torch=along(0, theirs),
           opset=18)
      for ours, theirs in REDUCTIONS.items()),
    Case("ScatterElements", [V([1.0, 0, 0, 2]), V([0, 1, 1, 2, 3, 3], np.int64), V([0.0, 3, 2, 4, 0, 0])],
         {"reduction": "mul"}, opset=18, torch=along(0, "prod"), name="zeros in a product"),
    Case("ScatterElements", [V([1.0, 2, 3]), V([0, 0, 1, 1], np.int64), V([1.0, 1, 2, -5])], {"reduction": "max"},
         opset=18, torch=along(0, "amax"), name="ties", fd=False),
    *(Case("ScatterElements", [R(4, dtype=t, low=0, high=9), V([1, 1, 3], np.int64), R(3, dtype=t, low=0, high=5)],
           {"reduction": r}, opset=18, grad=False) for t in (np.int8, np.uint8, np.int64, np.uint32)
      for r in ("add", "max")),
    *(Case("ScatterND", [R(3, 2), V([[1], [0], [1]], np.int64), R(3, 2)], {"reduction": ours}, opset=18,
           torch=at_tuples(theirs))
      for ours, theirs in REDUCTIONS.items()),
    Case("ScatterND", [R(3, 2), R(0, 1, dtype=np.int64), R(0, 2)], {"reduction": "max"}, opset=18,
         torch=at_tuples("amax"), name="none"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
