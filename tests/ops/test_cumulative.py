"""Running sums and products are those of torch, in either direction, inclusive or exclusive."""

import numpy as np
import pytest
import torch
from harness import OURS, C, Case, R, V, run_case

CASES = [
    *(Case("CumSum", [R(2, 4, 3), C(1)], {"exclusive": e, "reverse": r},
           torch=lambda x, a, e=e, r=r: running(x, 1, torch.cumsum, 0.0, e, r)) for e in (0, 1) for r in (0, 1)),
    Case("CumSum", [R(5), C(-1, np.int32)], torch=lambda x, a: x.cumsum(0)),
    Case("CumSum", [R(3, 0), C(0)], torch=lambda x, a: x.cumsum(0), name="empty"),
    Case("CumSum", [R(3, 4, dtype=np.int32, low=-9, high=9), C(1)], grad=False),
    *(Case("CumProd", [R(2, 4, 3), C(1)], {"exclusive": e, "reverse": r}, opset=26,
           torch=lambda x, a, e=e, r=r: running(x, 1, torch.cumprod, 1.0, e, r)) for e in (0, 1) for r in (0, 1)),
    *(Case("TorchCumProd", [R(*shape), C(axis)], {"exclusive": e, "reverse": r}, domain=OURS, alloc=False,
           torch=lambda x, a, e=e, r=r, d=axis: running(x, d, torch.cumprod, 1.0, e, r))
      for shape, axis in (((2, 5, 130), 1), ((19, 6), 1), ((3, 9, 2), 0)) for e in (0, 1) for r in (0, 1)),
    Case("TorchCumProd", [V([[0.0, 1e30, 1e30, 1e30], [1, 0, 2, 0]]), C(1)], domain=OURS,
         torch=lambda x, a: x.cumprod(1), name="ends"),
    Case("CumProd", [V([2.0, 0, 3, 0, 4]), C(0)], opset=26, torch=lambda x, a: x.cumprod(0), name="zeros"),
]


def running(x, axis, op, start, exclusive, reverse):
    x = x.flip(axis) if reverse else x
    if exclusive:
        x = torch.cat([torch.full_like(x.narrow(axis, 0, 1), start), x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    y = op(x, axis)
    return y.flip(axis) if reverse else y


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
