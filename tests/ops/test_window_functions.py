"""EyeLike and the windows have the numbers of torch, folded and at run time."""

import numpy as np
import pytest
import torch
from harness import C, R, flat, run_case

CASES = [
    flat("EyeLike", R(3, 4, dtype=np.int32, high=2), attrs={"k": 1}),
    flat("EyeLike", R(3, 2), attrs={"k": -1, "dtype": 11}),
    *(flat(op, C(n), attrs={"periodic": p, "output_datatype": 11}, opset=17, tol64=1e-6,
           reference=lambda n, w=w, p=p: getattr(torch, w)(
int(n), periodic=bool(p), dtype=torch.float64).numpy())
      for op, w in (("HannWindow", "hann_window"), ("BlackmanWindow", "blackman_window"))
      for p in (0, 1) for n in (1, 9) if n > 1 or not p),
    flat("HammingWindow", C(8), opset=17),
    # Results that are not folded: a device computes them.
    flat("EyeLike", R(370, 360), attrs={"k": -7, "dtype": 11}, alloc=False, name="large"),
    *(flat(op, C(131_073), attrs={"periodic": p, "output_datatype": 11}, opset=17, alloc=False, name=f"large {p}",
           tol64=1e-6, reference=lambda n, w=w, p=p: getattr(torch, w)(
int(n), periodic=bool(p), dtype=torch.float64).numpy())
      for op, w, p in (("HannWindow", "hann_window", 1), ("BlackmanWindow", "blackman_window", 0))),
    flat("HammingWindow", C(131_073), attrs={"output_datatype": 11}, opset=17, alloc=False, name="large", tol64=1e-6,
         reference=lambda n: torch.hamming_window(int(n), True, 25 / 46, 21 / 46, dtype=torch.float64).numpy()),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
