"""Products of integers wrap as NumPy's do, transposed and with a factor too."""

import numpy as np
import pytest
from harness import C, R, flat, run_case

INTS = (np.int32, np.int64, np.uint32, np.uint64)


@pytest.mark.parametrize("dtype", INTS)
def test_products_wrap(dtype):
    top = min(np.iinfo(dtype).max, 2**63 - 1)
    a, b = R(5, 7, low=top // 2, high=top, dtype=dtype), R(7, 4, low=0, high=9, dtype=dtype)
    run_case(flat("MatMul", a, b, reference=np.matmul))
    a, b = R(7, 5, low=0, high=top, dtype=dtype), R(4, 7, low=0, high=9, dtype=dtype)
    run_case(flat("Gemm", a, b, C([[1, 2, 3, 4]], dtype),
                  attrs={"transA": 1, "transB": 1, "alpha": 3.0, "beta": 2.0}, name="turned",
                  reference=lambda a, b, c: (dtype(3) * (a.T @ b.T) + dtype(2) * c).astype(dtype)))
