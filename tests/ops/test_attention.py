"""Attention, RotaryEmbedding and RMSNormalization: operators that stand for others."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Case, R, run_case  # noqa: E402

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
