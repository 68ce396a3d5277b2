"""RoiAlign and MaxRoiPool against plain indexing in torch, whose autograd gives the gradient to the features."""

import math

import numpy as np
import pytest
import torch
from harness import Case, R, V, expect_error, run_case

BOXES = [[0.3, 0.7, 4.2, 5.1], [-2.5, -1.0, 2.2, 1.4], [3.1, 2.2, 9.7, 8.9], [1.4, 1.6, 1.5, 1.9],
         [2.0, 2.0, 2.0, 2.0], [20.0, 20.0, 22.0, 23.0]]
IMAGES = [0, 1, 1, 0, 1, 0]


def around(extent, at):
    """Two cells and their weights along one axis; None: outside."""
    if at < -1 or at > extent:
        return None
    at = max(at, 0.0)
    low = int(at)
    if low >= extent - 1:
        return (extent - 1, extent - 1), (1.0, 0.0)
    return (low, low + 1), (1 - (at - low), at - low)


def align(x, boxes, images, *, scale=1.0, size=(1, 1), sampling=0, mode="avg", half_pixel=True):
    shift = 0.5 if half_pixel else 0.0
    result = []
    for box, image in zip(boxes.tolist(), images.tolist()):
        left, top, right, bottom = [v * scale - shift for v in box]
        height, width = bottom - top, right - left
        if not half_pixel:
            height, width = max(height, 1.0), max(width, 1.0)
        bins = height / size[0], width / size[1]
        grid = [sampling or max(math.ceil(b), 0) for b in bins]
        for i in range(size[0]):
            for j in range(size[1]):
                values = []
                for a in range(grid[0]):
                    for b in range(grid[1]):
                        rows = around(x.shape[2], top + (i + (a + 0.5) / grid[0]) * bins[0])
                        columns = around(x.shape[3], left + (j + (b + 0.5) / grid[1]) * bins[1])
                        if rows is None or columns is None:
                            values += [x.new_zeros(x.shape[1])] * 4
                            continue
                        values += [u * v * x[image, :, r, c] for r, u in zip(*rows) for c, v in zip(*columns)]
                if not values:
                    result.append(x.new_zeros(x.shape[1]))
                elif mode == "avg":
                    result.append(torch.stack(values).sum(0) / (len(values) // 4))
                else:
                    result.append(torch.stack(values).amax(0))
    return torch.stack(result).reshape(len(boxes), *size, -1).permute(0, 3, 1, 2)


def pool(x, boxes, *, scale=1.0, size=(1, 1)):
    away = lambda v: math.floor(abs(v) + 0.5) * (1 if v >= 0 else -1)  # noqa: E731
    result = []
    for row in boxes.tolist():
        left, top, right, bottom = [away(v * scale) for v in row[1:]]
        bins = max(bottom - top + 1, 1) / size[0], max(right - left + 1, 1) / size[1]
        for i in range(size[0]):
            for j in range(size[1]):
                r = [min(max(math.floor(i * bins[0]) + top, 0), x.shape[2]),
                     min(max(math.ceil((i + 1) * bins[0]) + top, 0), x.shape[2])]
                c = [min(max(math.floor(j * bins[1]) + left, 0), x.shape[3]),
                     min(max(math.ceil((j + 1) * bins[1]) + left, 0), x.shape[3])]
                cells = x[int(row[0]), :, r[0]:r[1], c[0]:c[1]]
                result.append(cells.amax((1, 2)) if cells.numel() else x.new_zeros(x.shape[1]))
    return torch.stack(result).reshape(len(boxes), *size, -1).permute(0, 3, 1, 2)


def align_case(name, opset=16, **options):
    attrs = {"output_height": options.get("size", (1, 1))[0], "output_width": options.get("size", (1, 1))[1],
             "spatial_scale": options.get("scale", 1.0), "sampling_ratio": options.get("sampling", 0),
             "mode": options.get("mode", "avg")}
    if opset >= 16:
        attrs["coordinate_transformation_mode"] = ("half_pixel" if options.get("half_pixel", True)
                                                   else "output_half_pixel")
    f = lambda x, b, i: align(x, b, i, **options)  # noqa: E731
    return Case("RoiAlign", [R(2, 3, 7, 6), V(BOXES), V(IMAGES, np.int64)], attrs, opset=opset, torch=f, grad=[0],
                name=name, tol=2e-4, tol64=1e-10,
                reference=lambda x, b, i: f(*map(torch.from_numpy, (x, b, i))).numpy(), alloc=name == "average")


def pool_case(name, **options):
    boxes = [[float(i), *b] for i, b in zip(IMAGES, BOXES)]
    f = lambda x, b: pool(x, b, **options)  # noqa: E731
    return Case("MaxRoiPool", [R(2, 3, 7, 6), V(boxes)],
                {"pooled_shape": list(options.get("size", (1, 1))), "spatial_scale": options.get("scale", 1.0)},
                torch=f, grad=[0], name=name, reference=lambda x, b: f(*map(torch.from_numpy, (x, b))).numpy(),
                alloc=name == "pool")


def equal_values():
    """Products of equal values with weights that are equal but for rounding: which is the largest depends on the type
    of the products.
    """
    f = lambda x, b, i: align(x, b, i, size=(2, 2), sampling=3, mode="max")  # noqa: E731
    return Case("RoiAlign", [R(1, 1, 5, 5, values=np.full((1, 1, 5, 5), 0.1)), V([[0.5, 0.5, 4.5, 4.5]]),
                             V([0], np.int64)],
                {"output_height": 2, "output_width": 2, "sampling_ratio": 3, "mode": "max"}, grad=[0], fd=False,
                kernels=False, alloc=False, name="equal values",
                reference=lambda x, b, i: f(*map(torch.from_numpy, (x, b, i))).numpy())


CASES = [
    equal_values(),
    align_case("average", size=(2, 3)), align_case("average, two samples", size=(3, 2), sampling=2, scale=0.5),
    align_case("whole pixels", size=(2, 2), half_pixel=False),
    align_case("opset 10", 10, size=(2, 2), half_pixel=False),
    align_case("one bin"), align_case("maximum", size=(2, 2), mode="max"),
    align_case("maximum, three samples", sampling=3, mode="max", half_pixel=False),
    pool_case("pool", size=(2, 3)), pool_case("pool scaled", size=(3, 2), scale=0.5), pool_case("pool one bin"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case):
    run_case(case)


def test_no_regions():
    run_case(Case("RoiAlign", [R(1, 2, 3, 3), R(0, 4), V(np.zeros(0), np.int64)],
                  {"output_height": 2, "output_width": 2}, alloc=False, grad=[0],
                  reference=lambda x, b, i: np.zeros((0, 2, 2, 2), x.dtype),
                  torch=lambda x, b, i: (x.sum() * 0).expand(0, 2, 2, 2)))


def test_refusals():
    x, box, image = R(2, 2, 5, 5), V([[0, 0, 2, 2]]), V([0], np.int64)
    expect_error(Case("RoiAlign", [x, box, V([2], np.int64)], {}), IndexError,
                 "region 0 is in image 2, but there are 2")
    expect_error(Case("RoiAlign", [x, box, V([-1], np.int64)], {}), IndexError, "region 0 is in image -1")
    expect_error(Case("RoiAlign", [x, V([[0, 0, np.nan, 2]]), image], {}), ValueError, "an edge at nan")
    expect_error(Case("RoiAlign", [x, V([[0, 0, 1e8, 2]]), image], {}), ValueError, "region 0 has 2 x 1e+08 cells")
    expect_error(Case("RoiAlign", [x, box, image], {"mode": "sum"}), ValueError, "mode is 'sum'")
    expect_error(Case("RoiAlign", [x, box, image], {"coordinate_transformation_mode": "pixel"}), ValueError,
                 "is 'pixel'")
    expect_error(Case("RoiAlign", [x, V([[0, 0, 2]]), image], {}), ValueError, "rois must have 4 columns")
    expect_error(Case("MaxRoiPool", [x, V([[5, 0, 0, 2, 2]])], {"pooled_shape": [1, 1]}), IndexError,
                 "region 0 is in image 5")
    expect_error(Case("MaxRoiPool", [x, V([[0, 0, 0, 2, 2]])], {"pooled_shape": [0, 1]}), ValueError,
                 "the output would have (0, 1) bins")
