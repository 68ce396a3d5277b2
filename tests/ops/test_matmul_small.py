"""Small products, which a kernel of their own computes, are those of torch."""

import pytest
import torch
from harness import Case, R, run_case
from test_matmul import fused, gemm

CASES = [
    Case("MatMul", [R(13, 9), R(9, 37)], torch=torch.matmul, name="small", alloc=False),
    Case("MatMul", [R(3, 5, 7), R(7, 16)], torch=torch.matmul, name="small, one vector", alloc=False),
    Case("MatMul", [R(9), R(9, 100)], torch=torch.matmul, name="small, one row", alloc=False),
    Case("MatMul", [R(64, 10), R(10, 500)], torch=torch.matmul, name="small, shared among threads", alloc=False),
    Case("FusedMatMul", [R(9, 11), R(9, 33)], {"transA": 1}, domain="ai.onnxtrain", torch=fused(1, 0, 1),
         name="small, A transposed", alloc=False),
    *[Case("Gemm", [R(9, 11) if ta else R(11, 9), R(9, 35), R(*c)], {"transA": ta}, torch=gemm(ta, 0, 1, 1),
           name=f"small {ta} {c}", alloc=False) for ta in (0, 1) for c in ((35,), (1, 35), (11, 1), (11, 35), ())],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matmul(case):
    run_case(case)
