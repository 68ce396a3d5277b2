"""Operators on images that only move elements, against torch and NumPy; and columns of windows,
against fold and unfold.
"""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import OURS, C, Case, R, expect_error, run_case

from onnxtrain import UnsupportedError


def by_torch(f):
    return lambda x, *rest: f(torch.from_numpy(x)).numpy()


def depth_to_space(x, size, mode):
    n, c, h, w = x.shape
    if mode == "CRD":
        return F.pixel_shuffle(x, size)
    return F.pixel_shuffle(x.reshape(n, size * size, c // size**2, h, w).transpose(1, 2).reshape(x.shape), size)


def space_to_depth(x, size, mode):
    y = F.pixel_unshuffle(x, size)
    n, c, h, w = y.shape
    return y if mode == "CRD" else y.reshape(n, c // size**2, size * size, h, w).transpose(1, 2).reshape(y.shape)


def centre(shape, sizes, axes=None):
    """Crops by slices, pads by F.pad: the smaller part in front."""
    def f(x):
        for axis, size in zip(range(x.dim()) if axes is None else axes, sizes):
            have = x.shape[axis]
            if size <= have:
                x = x.narrow(axis, (have - size) // 2, size)
            else:
                front = (size - have) // 2
                x = F.pad(x.transpose(axis, -1), (front, size - have - front)).transpose(axis, -1)
        return x

    attrs = {} if axes is None else {"axes": axes}
    return Case("CenterCropPad", [R(*shape), C(sizes)], attrs, torch=lambda x, s: f(x), reference=by_torch(f),
                name=f"{shape}-{sizes}-{axes}", alloc=axes is None)


CASES = []
for size, mode in itertools.product((1, 2, 3), ("DCR", "CRD")):
    x, y = R(2, 2 * size * size, 2, 3), R(2, 2, 2 * size, 3 * size)
    CASES += [
        Case("DepthToSpace", [x], {"blocksize": size, "mode": mode},
             torch=lambda x, s=size, m=mode: depth_to_space(x, s, m),
             alloc=size == 2, opset=13),
        Case("SpaceToDepth", [y], {"blocksize": size} | ({"mode": mode} if mode == "CRD" else {}), alloc=False,
             opset=13 if mode == "DCR" else 28, torch=lambda x, s=size, m=mode: space_to_depth(x, s, m),
             reference=by_torch(lambda x, s=size, m=mode: space_to_depth(x, s, m))),
    ]
CASES += [
    Case("DepthToSpace", [R(1, 4, 2, 2)], {"blocksize": 2}, opset=1, torch=lambda x: depth_to_space(x, 2, "DCR"),
         alloc=False, reference=by_torch(lambda x: depth_to_space(x, 2, "DCR"))),
    Case("DepthToSpace", [R(0, 4, 2, 2)], {"blocksize": 2}, torch=lambda x: x.reshape(0, 1, 4, 4), alloc=False),
    Case("DepthToSpace", [R(1, 4, 2, 2, dtype=np.uint8, low=0, high=9)], {"blocksize": 2}, alloc=False),
    centre((4, 7, 3), [6, 3, 3]), centre((4, 7, 3), [9, 7, 4]), centre((4, 7, 3), [5, 8], [1, -1]), centre((5,), [0]),
    centre((5,), [10]),
    Case("CenterCropPad", [R(3, 4, dtype=np.int64, low=0, high=9), C([5, 2])], {}, alloc=False),
    Case("CenterCropPad", [R(3, 4, dtype=np.bool_), C([2, 7])], {}, alloc=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_moves(case):
    run_case(case)


FOLDS = [
    ((5, 6), (2, 3), {}),
    ((7, 5), (3, 2), {"strides": [2, 1], "pads": [1, 0, 1, 0]}),
    ((6, 6), (2, 2), {"dilations": [2, 3], "pads": [1, 2, 1, 2]}),
    ((4, 4), (2, 2), {"strides": [2, 2]}),
]


def columns(image, block, attrs, batch):
    options = {"kernel_size": block, "dilation": tuple(attrs.get("dilations", (1, 1))),
               "stride": tuple(attrs.get("strides", (1, 1))),
               "padding": tuple(attrs.get("pads", (0, 0))[:2])}
    windows = F.unfold(torch.zeros(1, 1, *image), **options).shape[2]
    fold = lambda x, *rest: F.fold(x, image, **options)  # noqa: E731
    yield Case("Col2Im", [R(batch, 3 * block[0] * block[1], windows), C(image), C(block)], attrs, torch=fold,
                reference=by_torch(fold), alloc=batch == 2, name=f"{image}-{block}-{attrs}-{batch}")
    unfold = lambda x: F.unfold(x, **options)  # noqa: E731
    yield Case("Im2Col", [R(2, 3, *image)], attrs | {"image_shape": image, "block_shape": block}, domain=OURS,
               torch=unfold, alloc=False, grad=False, name=f"{image}-{block}-{attrs}-{batch}")


COLUMNS = [case for fold in FOLDS for batch in (0, 2) for case in columns(*fold, batch)]
# Padding at one end, one and three dims, integers: differences, and the evaluator.
COLUMNS += [
    Case("Col2Im", [R(2, 6, 4), C([5]), C([3])], {"pads": [0, 1]}, alloc=False, name="one dim"),
    Case("Col2Im", [R(1, 8, 4), C([3, 3, 2]), C([2, 2, 2])], {}, alloc=False, name="three dims"),
    Case("Col2Im", [R(1, 4, 6, dtype=np.int64, low=-9, high=9), C([3, 4]), C([2, 2])], {}, alloc=False),
]


@pytest.mark.parametrize("case", COLUMNS, ids=str)
def test_columns(case):
    run_case(case)


def test_refusals():
    expect_error(Case("DepthToSpace", [R(1, 6, 2, 2)], {"blocksize": 2}), ValueError, "do not divide into blocks of 2")
    expect_error(Case("DepthToSpace", [R(1, 4, 2, 2)], {"blocksize": 2, "mode": "RCD"}), ValueError, "mode is 'RCD'")
    expect_error(Case("SpaceToDepth", [R(1, 4, 3, 2)], {"blocksize": 2}), ValueError, "do not divide")
    expect_error(Case("SpaceToDepth", [R(1, 4, 2, 2)], {"blocksize": 0}), ValueError, "blocksize is 0")
    expect_error(Case("CenterCropPad", [R(3, 4), C([2])], {}), ValueError, "shape has 1 entries for 2 axes")
    expect_error(Case("CenterCropPad", [R(3, 4), C([2, 2])], {"axes": [0, -2]}), ValueError, "axis 0 twice")
    expect_error(Case("Col2Im", [R(1, 4, 5), C([3, 4]), C([2, 2])], {}), ValueError,
                 "the input is not (batch, channels * 4, 6)")
    expect_error(Case("Col2Im", [R(1, 4, 5), C([1, 4]), C([2, 2])], {}), ValueError, "the block does not fit in dim 0")
    expect_error(Case("Col2Im", [R(1, 4, 5), C([2, 2, 2, 2]), C([1, 1, 1, 1])], {}), UnsupportedError,
                 "an image of 4 dims")


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
