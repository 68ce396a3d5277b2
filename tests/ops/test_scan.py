"""CumSum and CumProd along lines of more elements than a block has threads, and of many neighbouring lines."""

from __future__ import annotations

import pytest
import torch
from harness import C, Case, R, run_case

CASES = [Case("CumSum", [R(*shape), C(axis)], {"exclusive": exclusive, "reverse": reverse}, fd=False, alloc=False,
              reference=None, tol=1e-4)
         for shape, axis in (((3, 300), 1), ((7, 5, 40), 1))
         for exclusive in (0, 1) for reverse in (0, 1)]
CASES += [Case("TorchCumProd", [R(2, 150, low=0.9, high=1.1), C(1)], domain="ai.onnxtrain", fd=False, alloc=False,
               torch=lambda x, axis: torch.cumprod(x, 1), tol=1e-4),
          Case("CumSum", [R(2, 200, dtype="int64", low=-50, high=50), C(1)], grad=False, alloc=False, name="of integers")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scan(case):
    run_case(case)
