"""LpPool takes norms of windows, and MaxUnpool puts values where MaxPool found them."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, V, expect_error, run_case
from test_pool import by_torch

CASES = [
    Case("LpPool", [R(2, 2, 7, 5, low=0.1)], {"kernel_shape": [2, 3], "strides": [2, 1], "p": 3}, opset=18, tol=1e-4,
         torch=lambda x: F.lp_pool2d(x, 3, (2, 3), (2, 1)),
         reference=by_torch(lambda x: F.lp_pool2d(x, 3, (2, 3), (2, 1)))),
    Case("LpPool", [R(1, 2, 6, apart=0.1)], {"kernel_shape": [2], "p": 1.5}, opset=1, tol=1e-4, name="p of opset 1",
         kernels=False, torch=lambda x: (F.avg_pool1d(x.abs() ** 1.5, 2, 1) * 2) ** (1 / 1.5),
         reference=by_torch(lambda x: (F.avg_pool1d(x.abs() ** 1.5, 2, 1) * 2) ** (1 / 1.5))),
    Case("GlobalLpPool", [R(2, 3, 4, 5, apart=0.1)], torch=lambda x: x.flatten(2).norm(2, -1)[..., None, None],
         reference=by_torch(lambda x: x.flatten(2).norm(2, -1)[..., None, None])),
    Case("GlobalLpPool", [R(2, 3, 7, apart=0.1)], {"p": 3}, torch=lambda x: x.norm(3, -1, True), tol=1e-4,
         reference=by_torch(lambda x: x.norm(3, -1, True))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pool(case):
    run_case(case)


def unpool(shape, pooled, **options):
    def run(x):
        indices = pooled(torch.from_numpy(R(*shape).make(11)), **options, return_indices=True)[1]
        return (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)[x.dim() - 3](x, indices, options["kernel_size"],
                                                                             options["stride"],
                                                                          output_size=shape[2:])

    return run


def unpool_case(shape, pooled, k, s):
    x = torch.from_numpy(R(*shape).make(11))
    y, indices = pooled(x, k, s, return_indices=True)
    plane = math.prod(shape[2:])
    flat = indices + (torch.arange(shape[0] * shape[1]) * plane).reshape(*shape[:2], *[1] * (len(shape) - 2))
    f = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)[len(shape) - 3]
    rank = len(shape) - 2
    return Case("MaxUnpool", [R(*y.shape), flat.numpy()], {"kernel_shape": [k] * rank, "strides": [s] * rank},
                torch=lambda x, _: f(x, indices, k, s), reference=lambda x, _: f(torch.from_numpy(x), indices, k,
                                                                                 s).numpy())


UNPOOL = [unpool_case((2, 2, 8), F.max_pool1d, 2, 2), unpool_case((2, 2, 6, 9), F.max_pool2d, 3, 3),
          unpool_case((1, 2, 4, 4, 6), F.max_pool3d, 2, 2)]


@pytest.mark.parametrize("case", UNPOOL, ids=str)
def test_unpool(case):
    run_case(case)


def test_unpool_into_a_larger_shape():
    indices = np.array([[[[5, 7], [13, 15]]]])
    expected = np.zeros((1, 1, 5, 5))
    expected[0, 0, [1, 1, 3, 3], [1, 3, 1, 3]] = [1, 2, 3, 4]
    run_case(Case("MaxUnpool", [V([[[[1.0, 2.0], [3.0, 4.0]]]]), indices, C([1, 1, 5, 5])],
                  {"kernel_shape": [2, 2], "strides": [2, 2]},
                  reference=lambda x, i, s: expected.astype(x.dtype)))


def test_unpool_index_out_of_range():
    for index in (-1, 16):
        case = Case("MaxUnpool", [R(1, 1, 2, 2), np.full((1, 1, 2, 2), index)],
                    {"kernel_shape": [2, 2], "strides": [2, 2]})
        expect_error(case, IndexError, f"index {index} is out of range for 16 cells")
