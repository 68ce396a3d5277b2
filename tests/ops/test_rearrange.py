"""Operators on images that only move elements do so as torch and NumPy do; refusals of them and of Col2Im."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, expect_error, run_case

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
