"""MatMul, Gemm, FusedMatMul and GroupedMatMul have the values and gradients of torch."""

import numpy as np
import pytest
import torch
from harness import Case, R, V, expect_error, run_case


def fused(ta, tb, alpha):
    def run(a, b):
        return alpha * ((a.mT if ta else a) @ (b.mT if tb else b))

    return run


def gemm(ta, tb, alpha, beta):
    def run(a, b, c=None):
        y = alpha * ((a.T if ta else a) @ (b.T if tb else b))
        return y if c is None else y + beta * c

    return run


def grouped(trans):
    def run(x, w, ends):
        starts = [0, *ends.tolist()[:-1]]
        rows = [x[a:b] @ (w[e].T if trans else w[e]) for e, (a, b) in enumerate(zip(starts, ends.tolist()))]
        return torch.cat([*rows, x.new_zeros(len(x) - int(ends[-1]), w.shape[1 if trans else 2])])

    return run


CASES = [
    Case("MatMul", [R(3, 4), R(4, 5)], torch=torch.matmul),
    Case("MatMul", [R(2, 3, 4), R(4, 5)], torch=torch.matmul),
    Case("MatMul", [R(2, 3, 4), R(2, 4, 5)], torch=torch.matmul),
    Case("MatMul", [R(2, 1, 3, 4), R(5, 4, 2)], torch=torch.matmul),
    Case("MatMul", [R(3, 4), R(2, 4, 5)], torch=torch.matmul),
    Case("MatMul", [R(4), R(4, 5)], torch=torch.matmul),
    Case("MatMul", [R(3, 4), R(4)], torch=torch.matmul),
    Case("MatMul", [R(4), R(4)], torch=torch.matmul),
    Case("MatMul", [R(2, 3, 4), R(4)], torch=torch.matmul),
    Case("MatMul", [R(4), R(2, 4, 3)], torch=torch.matmul),
    Case("MatMul", [R(3, 0), R(0, 5)], torch=torch.matmul, name="K is 0"),
    Case("MatMul", [R(0, 4), R(4, 5)], torch=torch.matmul, name="M is 0"),
    Case("MatMul", [R(0, 3, 4), R(4, 5)], torch=torch.matmul, name="no batch"),
    Case("MatMul", [R(65, 130), R(130, 70)], torch=torch.matmul, name="measured", alloc=False),
    *[Case("FusedMatMul", [R(3, 4) if not ta else R(4, 3), R(4, 5) if not tb else R(5, 4)],
           {"transA": ta, "transB": tb, "alpha": 0.5}, domain="ai.onnxtrain", torch=fused(ta, tb, 0.5))
      for ta in (0, 1) for tb in (0, 1)],
    *[Case("FusedMatMul", [R(2, 3, 4) if not ta else R(2, 4, 3), R(2, 4, 5) if not tb else R(2, 5, 4)],
           {"transA": ta, "transB": tb}, domain="ai.onnxtrain", torch=fused(ta, tb, 1))
      for ta in (0, 1) for tb in (0, 1)],
    *[Case("FusedMatMul", [R(*lead_a, *((k, m) if ta else (m, k))), R(*lead_b, *((n, k) if tb else (k, n)))],
           {"transA": ta, "transB": tb, "alpha": float(alpha)}, domain="ai.onnxtrain", torch=fused(ta, tb, alpha),
           name=f"batch {m} {n} {k} {ta} {tb}", alloc=False)
      for ta in (0, 1) for tb in (0, 1) for lead_a, lead_b, m, n, k, alpha in (
          ((7,), (7,), 3, 3, 3, 1), ((5,), (5,), 2, 2, 2, 0.5), ((4,), (1,), 4, 4, 4, 1), ((3, 1, 2), (4, 1), 5, 7, 2, 1),
          ((2, 3), (2, 3), 9, 8, 7, 1), ((1, 5), (3, 1), 3, 1, 6, 2), ((900,), (900,), 1, 5, 8, 1), ((6,), (6,), 11, 6, 1, 1))],
    *[Case("MatMul", [R(6, m, k), R(6, k, n)], torch=torch.matmul, name=f"batch {m} {n} {k}")
      for m, n, k in ((3, 4, 0), (3, 0, 2), (0, 3, 2))],
    Case("FusedMatMul", [R(2, 4, 3), R(4, 5)], {"transA": 1}, domain="ai.onnxtrain", torch=fused(1, 0, 1),
         name="shared B"),
    *[Case("Gemm", [R(3, 4) if not ta else R(4, 3), R(4, 5) if not tb else R(5, 4), R(*c)],
           {"transA": ta, "transB": tb, "alpha": 0.5, "beta": 2.0}, torch=gemm(ta, tb, 0.5, 2.0))
      for ta in (0, 1) for tb in (0, 1) for c in ((5,), (3, 1), (), (3, 5))],
    Case("Gemm", [R(3, 4), R(4, 5)], torch=gemm(0, 0, 1, 1)),
    *[Case("GroupedMatMul", [R(7, 3), R(len(ends), 5, 3) if trans else R(len(ends), 3, 5), V(ends, dtype)],
           {"transB": trans}, domain="ai.onnxtrain", torch=grouped(trans), name=f"{trans} {ends}")
      for trans in (0, 1) for ends, dtype in (([2, 2, 7], np.int64), ([0, 3, 5], np.int32), ([0, 0], np.int64))],
    Case("GroupedMatMul", [R(4, 0), R(2, 0, 5), V([1, 4], np.int64)], domain="ai.onnxtrain", torch=grouped(0),
         name="K is 0"),
    Case("GroupedMatMul", [R(0, 3), R(2, 3, 5), V([0, 0], np.int64)], domain="ai.onnxtrain", torch=grouped(0),
         name="no rows"),
    Case("GroupedMatMul", [R(400, 65), R(3, 65, 70), V([130, 250, 400], np.int64)], domain="ai.onnxtrain",
         torch=grouped(0), name="measured", alloc=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matmul(case):
    run_case(case)


@pytest.mark.parametrize("inputs, error, match", [
    ([R(4, 3), R(2, 3, 5), V([3, 2], np.int64)], IndexError, "end 2 of group 1 is outside 3 to 4"),
    ([R(4, 3), R(2, 3, 5), V([-1, 2], np.int64)], IndexError, "end -1 of group 0"),
    ([R(4, 3), R(2, 3, 5), V([1, 5], np.int64)], IndexError, "end 5 of group 1"),
    ([R(4, 3), R(3, 3, 5), V([1, 4], np.int64)], ValueError, "3 matrices, 2 ends"),
    ([R(4, 3), R(2, 4, 5), V([1, 4], np.int64)], ValueError, "rows have 3 columns, matrices 4 rows"),
    ([R(4, 3), R(4, 5), V([1, 4], np.int64)], ValueError, "expected 2 and 3"),
    ([R(4, 3), R(2, 3, 5), V([1.0, 4.0])], TypeError, "ends are float"),
])
def test_groups_are_checked(inputs, error, match):
    expect_error(Case("GroupedMatMul", inputs, domain="ai.onnxtrain"), error, match)
