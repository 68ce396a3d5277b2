"""Lp normalisation is torch's, and is zero where the norm is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, V, call, run_case, session_of
from test_groupnorm import by_torch


def lp(shape, axis, p):
    return Case("LpNormalization", [R(*shape, apart=0.1)], {"axis": axis, "p": p}, opset=22,
                torch=lambda x: F.normalize(x, p, axis, 0),
                reference=by_torch(lambda x: F.normalize(x, p, axis, 0)), alloc=False, name=f"{shape}-{axis}-{p}")


CASES = [
    lp((3, 4, 2), -1, 2), lp((3, 4, 2), 1, 1), lp((3, 4, 2), 0, 2), lp((5,), 0, 1), lp((2, 0, 3), 2, 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case):
    run_case(case)


@pytest.mark.parametrize("p", [1, 2])
def test_norm_of_zero(p):
    """The specification's zero, and a gradient that is a number."""
    f = lambda x: F.normalize(x, p, -1, 1e-30)  # noqa: E731
    run_case(Case("LpNormalization", [V([[0, 0, 0], [1, -2, 2]])], {"p": p}, opset=22, name=f"zero {p}", alloc=False,
                  grad=False, reference=by_torch(f)))
    case = Case("LpNormalization", [V([[0, 0, 0], [1, -2, 2]])], {"p": p}, opset=22, dtypes=(np.float64,))
    x = torch.tensor([[0, 0, 0], [1, -2, 2]], dtype=torch.float64)
    _, (dx,) = call(session_of(case, [x.numpy()]), [x], b"\1", [torch.ones(2, 3, dtype=torch.float64)])
    assert torch.isfinite(dx).all()
