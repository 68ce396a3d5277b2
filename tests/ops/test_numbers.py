"""Clip and IsNaN of further number types; operators that broadcast by attribute before opset 7."""

import numpy as np
import pytest
import torch
from harness import Case, R, V, flat, run_case
from test_elementwise_rows import old

CASES = [
    flat("Clip", V([1, 2**63, 2**64 - 1], np.uint64), V(2, np.uint64), V(2**63 + 1, np.uint64)),
    flat("IsNaN", V([1.0, np.inf, np.nan], np.float16)),
    old("Add", (2, 3, 4), (3,), axis=1, broadcast=1, torch=lambda x, y: x + y[:, None]),
    old("Mul", (2, 3), (3,), broadcast=1, torch=lambda x, y: x * y),
    old("Sub", (2, 3, 4), (2, 3), axis=0, broadcast=1, torch=lambda x, y: x - y[..., None]),
    old("Div", (2, 3), (2, 3), torch=lambda x, y: x / y),
    old("Gemm", (3, 2), (3, 4), (4,), transA=1, broadcast=1, torch=lambda a, b, c: a.T @ b + c),
    Case("BatchNormalization", [R(4, 3, 2), R(3), R(3), R(3), R(3, low=0.5, high=2)], {"is_test": 1}, opset=6,
         grad=[0, 1, 2],
         torch=lambda x, w, b, m, v: torch.nn.functional.batch_norm(x, m, v, w, b), reference=lambda x, w, b, m, v: (
             (x - m[:, None]) / np.sqrt(v[:, None] + 1e-5) * w[:, None] + b[:, None]).astype(x.dtype)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
