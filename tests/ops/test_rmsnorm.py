"""RMSNormalization has the values and gradients of torch."""

import pytest
import torch.nn.functional as F
from harness import Case, R, expect_error, run_case
from test_attention import shaped

CASES = [
    Case("RMSNormalization", [R(2, 3, 8), R(8)], opset=23, torch=lambda x, s: F.rms_norm(x, (8,), s, 1e-5)),
    Case("RMSNormalization", [R(2, 3, 4), R(3, 4)], {"axis": 1, "epsilon": 0.125}, opset=23, name="axis 1",
         torch=lambda x, s: F.rms_norm(x, (3, 4), s, 0.125)),
    Case("RMSNormalization", [R(2, 4), R(1)], {"axis": 0}, opset=23, name="all",
         torch=lambda x, s: F.rms_norm(x, (2, 4), None, 1e-5) * s),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


ERRORS = [
    (shaped("RMSNormalization", R(2, 3), R(4)), ValueError, "roadcast"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
