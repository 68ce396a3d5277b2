"""GroupedMatMul of several tiles, of empty groups, and of rows behind the last group; test_matmul.py has the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import Case, R, V, run_case


def grouped(rows, k, n, ends, trans=0):
    def f(x, w, e):
        groups = torch.tensor_split(x, [int(v) for v in ends])
        each = [g @ (m.T if trans else m) for g, m in zip(groups, w)]
        return torch.cat([*each, torch.zeros(len(groups[-1]), n, dtype=x.dtype)])

    matrix = (len(ends), n, k) if trans else (len(ends), k, n)
    return Case("GroupedMatMul", [R(rows, k), R(*matrix), V(ends, np.int64)], {"transB": trans},
                domain="ai.onnxtrain", grad=[0, 1], torch=f, fd=False, alloc=False, tol=1e-3,
                reference=lambda x, w, e: f(*map(torch.from_numpy, (x, w, e))).numpy(), name=f"{rows}-{k}-{n}-{ends}-{trans}")


CASES = [grouped(150, 20, 70, [70, 70, 140], trans) for trans in (0, 1)] + [grouped(30, 3, 2, [0, 0, 0]),
                                                                           grouped(65, 17, 65, [65])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups(case):
    run_case(case)
