"""Products whose operands do not fit are refused."""

import numpy as np
from harness import Case, R, expect_error


def test_inner_dims_differ():
    expect_error(Case("MatMul", [R(3, 4), R(5, 6)]), ValueError, "inner dims differ")


def test_gemm_bias_too_large():
    expect_error(Case("Gemm", [R(3, 4), R(4, 5), R(2, 3, 5)]), ValueError, "broadcast")


def test_dtypes_differ():
    expect_error(Case("MatMul", [R(3, 4), R(4, 5, dtype=np.float64)]), TypeError, "float and double")
