"""Products and convolutions of 8-bit integers are exact."""

import numpy as np
import pytest
import torch
from harness import R, V, run_case
from test_quantize import flat

CASES = [
    flat("MatMulInteger", R(3, 4, dtype=np.uint8, high=255, low=0), R(4, 2, dtype=np.int8, low=-128, high=127),
         V([9, 8, 7], np.uint8), V(3, np.int8), opset=10,
         reference=lambda a, b, za, zb: (a.astype(np.int32) - za[:, None]) @ (b.astype(np.int32) - zb)),
    flat("MatMulInteger", R(2, 3, 4, dtype=np.uint8, high=255, low=0), R(4, 2, dtype=np.uint8, low=0, high=255), None,
         V([1, 200], np.uint8), opset=10,
         reference=lambda a, b, za, zb: a.astype(np.int32) @ (b.astype(np.int32) - zb)),
    flat("ConvInteger", R(1, 2, 5, 5, dtype=np.uint8, high=255, low=0), R(3, 2, 3, 3, dtype=np.uint8, high=255, low=0),
         V(3, np.uint8),
         V([1, 2, 3], np.uint8), attrs={"pads": [1, 1, 1, 1], "strides": [2, 1]}, opset=10,
         reference=lambda x, w, zx, zw: torch.conv2d(
torch.tensor(x).double() - float(zx), torch.tensor(w).double() - torch.tensor(zw)[:, None, None, None].double(),
padding=1, stride=(2, 1)).int().numpy()),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
