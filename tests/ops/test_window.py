"""Windows without a cell, far larger than the plane, and of more cells than 64 bits count do no harm."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, call, run_case, session_of
from test_pool import by_torch


def test_windows_without_a_cell():
    """As the specification pads: the lowest value, and nothing flows back."""
    case = Case("MaxPool", [R(1, 1, 2)], {"kernel_shape": [1], "pads": [1, 1]}, grad=False,
                reference=lambda x: np.concatenate([[-np.inf], x[0, 0], [-np.inf]]).astype(x.dtype)[None, None])
    run_case(case)
    x = torch.randn(1, 1, 2, dtype=torch.float64)
    _, grads = call(session_of(case, [x.numpy()]), [x], b"\1",
                    [torch.arange(4.0, dtype=torch.float64).reshape(1, 1, 4)])
    assert grads[0].tolist() == [[[1.0, 2.0]]]


@pytest.mark.parametrize("height", [2**31 - 1, 2**29])
@pytest.mark.parametrize("op", ["MaxPool", "LpPool"])
def test_windows_far_larger_than_the_plane(op, height):
    """Offsets in such a window do not fit 32 bits; every one of them sees all rows."""
    def f(x):
        x = F.pad(x, (0, 1), value=-math.inf if op == "MaxPool" else 0.0)
        pairs = torch.stack([x[..., :-1], x[..., 1:]], -1)
        y = pairs.amax((2, 4)) if op == "MaxPool" else pairs.square().sum((2, 4)).sqrt()
        return y[:, :, None].expand(*x.shape[:-1], y.shape[-1])

    run_case(Case(op, [R(1, 3, 6, 5, apart=0.05)], {"kernel_shape": [height, 2], "auto_pad": "SAME_UPPER"}, torch=f,
                  reference=by_torch(f), opset=22, tol=2e-4, alloc=False))


HOSTILE = """
from harness import OURS, C, Case, R, expect_error

BIG, LESS = [1 << 22, 1 << 21, 1 << 21], [1 << 21, 1 << 21, 1 << 20]
PADS = [[b - 1 for b in block] + [0, 0, 0] for block in (BIG, LESS)]
ONE = [1, 1, 1]
for case, match in (
        (Case("Col2Im", [R(1, 8, 1), C(BIG), C(BIG)]), "cells of the image is beyond 64 bits"),
        (Case("Col2Im", [R(1, 8, 1), C(ONE), C(BIG)], {"pads": PADS[0]}), "cells of the window is beyond 64 bits"),
        (Case("Im2Col", [R(1, 8, 1, 1, 1)], {"image_shape": ONE, "block_shape": BIG, "pads": PADS[0]}, domain=OURS),
         "cells of the window is beyond 64 bits"),
        (Case("Im2Col", [R(1, 8, 1, 1, 1)], {"image_shape": ONE, "block_shape": LESS, "pads": PADS[1]}, domain=OURS),
         "8 channels of 4611686018427387904 cells are beyond 64 bits"),
        (Case("AveragePool", [R(1, 1, 1, 1, 1)], {"kernel_shape": BIG, "pads": PADS[0]}),
         "cells of the window is beyond 64 bits")):
    print(case, flush=True)
    expect_error(case, ValueError, match)
"""


def test_windows_of_more_cells_than_64_bits_count():
    """In a process of its own, which a remainder by a product that has become zero would end."""
    done = subprocess.run([sys.executable, "-c", HOSTILE],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr[-2000:]}"
