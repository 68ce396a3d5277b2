"""Where, Clip, IsNaN and logical operators take operands of other dtypes than their result."""

import numpy as np
import pytest
import torch
from harness import C, Case, R, V, expect_error, flat, run_case
from test_elementwise_ops import INF, NAN

CASES = [
    *[flat(op, R(3, 4, dtype=bool), R(4, dtype=bool)) for op in ("And", "Or", "Xor")],
    *[flat(op, x, y, name=f"one-{i}") for op in ("And", "Or", "Xor") for one in (False, True)
      for i, (x, y) in enumerate(((V([one], bool), R(3, 67, dtype=bool)), (R(3, 67, dtype=bool), V([one], bool))))],
    flat("Not", R(3, 4, dtype=bool)),
    flat("IsNaN", V([NAN, 1.0, INF])),
]

# ---- selection ----
for c, x, y in [((3, 4), (3, 4), (3, 4)), ((3, 4), (), (4,)), ((4,), (3, 4), ()), ((3, 1), (1, 4), (2, 1, 1)),
                ((), (2,), (2,)), ((3, 4), (), ()), ((), (3, 1), (4,))]:
    CASES.append(Case("Where", [R(*c, dtype=bool), R(*x), R(*y)], torch=torch.where, alloc=c == (3, 4)))
CASES += [flat("Where", R(3, 4, dtype=bool), R(3, 4, low=0, high=9, dtype=t), R(4, low=0, high=9, dtype=t))
          for t in (np.int64, np.int32, np.uint8, bool)]
EDGE = V([-2.0, -1.0, -0.5, 1.0, 3.0, NAN])
CASES += [
    Case("Clip", [EDGE, C(-1.0, "float"), C(1.0, "float")], torch=lambda x, a, b: torch.clamp(x, -1, 1), name="both"),
    Case("Clip", [EDGE, C(-1.0, "float")], torch=lambda x, a: torch.clamp(x, min=-1), name="min"),
    Case("Clip", [EDGE, None, C(1.0, "float")], torch=lambda x, b: torch.clamp(x, max=1), name="max"),
    Case("Clip", [EDGE], torch=lambda x: x.clone(), name="none"),
    Case("Clip", [EDGE, C(1.0, "float"), C(-1.0, "float")], torch=lambda x, a, b: torch.clamp(x, 1, -1),
         name="crossed"),
    Case("Clip", [V([-2.0, -1.0, 0.5, 1.0, 3.0])], {"min": -1.0, "max": 1.0}, opset=6, name="attributes",
         torch=lambda x: torch.clamp(x, -1, 1)),
    flat("Clip", V([-5, 0, 5], np.int64), C(-1), C(2), name="ints"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_elementwise(case):
    run_case(case)


ERRORS = [
    (flat("Where", V([1.0]), V([1.0]), V([1.0])), TypeError, "bool"),
    (flat("And", V([1.0]), V([1.0])), TypeError, "bool"),
]


@pytest.mark.parametrize("case, error, match", ERRORS, ids=[str(case) for case, _, _ in ERRORS])
def test_refuses(case, error, match):
    expect_error(case, error, match)
