"""Depthwise convolutions of rows and volumes have the values and gradients of torch."""

import pytest
import torch.nn.functional as F
from harness import Case, R, run_case
from test_conv import conv

CASES = [
    *(Case("Conv", [R(2, 5, length), R(5, 1, taps), R(5)], {"group": 5, "dilations": [step], "pads": [pad, pad]},
           torch=conv(groups=5, dilation=step, padding=pad), name=f"rows {length} {taps} {pad} {step}", alloc=False)
      for length, taps, pad, step in ((40, 9, 4, 1), (40, 4, 0, 2), (7, 5, 9, 1), (6, 3, 8, 3), (4, 4, 0, 1),
                                       (20, 1, 2, 1))),
    Case("Conv", [R(2, 4, 3, 20), R(4, 1, 1, 5)], {"group": 4, "pads": [0, 2, 0, 2]},
         torch=conv(groups=4, padding=(0, 2)), name="depthwise rows of an image"),
    *(Case("Conv", [R(2, 3, *size), R(3, 1, *kernel), R(3)], {"group": 3, "dilations": [*step], "pads": [*pad, *pad]},
           torch=conv(groups=3, dilation=step, padding=pad), name=f"volumes {size} {kernel} {pad} {step}", alloc=False)
      for size, kernel, pad, step in (
          ((4, 5, 30), (3, 3, 3), (1, 1, 1), (1, 1, 1)), ((4, 5, 6), (1, 3, 2), (0, 2, 3), (1, 2, 1)),
          ((3, 4, 20), (2, 1, 5), (3, 0, 0), (1, 1, 2)), ((5, 4, 3), (5, 4, 3), (0, 0, 0), (1, 1, 1)))),
    Case("Conv", [R(1, 2, 3, 4, 5), R(2, 1, 2, 2, 2)], {"group": 2, "pads": [0, 1, 2, 2, 0, 1]},
         name="volumes, uneven padding", torch=lambda x, w: F.conv3d(F.pad(x, (2, 1, 1, 0, 0, 2)), w, groups=2)),
    Case("Conv", [R(0, 4, 20), R(4, 1, 5)], {"group": 4}, torch=conv(groups=4), name="depthwise rows, no image"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conv(case):
    run_case(case)
