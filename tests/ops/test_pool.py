"""Pooling against a table of windows made from the specification, and against torch's own functions.

The grid of attribute combinations is sampled; ONNXTRAIN_TEST_SEED (printed on failure in the case's name) fixes it.
"""

import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, V, expect_error, run_case
from seeds import fixed_seed

from onnxtrain import _C

SEED = fixed_seed()


def axis_windows(size: int, k: int, s: int, d: int, begin: int, end: int, ceil: bool, auto_pad: str):
    """Per output along one dim: the cells of its window (those inside), and how many count with padding included."""
    extent = (k - 1) * d + 1
    if auto_pad.startswith("SAME"):
        outputs = math.ceil(size / s)
        total = max(0, (outputs - 1) * s + extent - size)
        begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        end = total - begin
    elif auto_pad == "VALID":
        begin = end = 0
    span = (size + begin + end - extent) / s
    outputs = (math.ceil(span) if ceil else math.floor(span)) + 1
    if ceil and (outputs - 1) * s >= size + begin:
        outputs -= 1
    cells, counts = [], []
    for o in range(outputs):
        positions = [o * s - begin + i * d for i in range(k)]
        cells.append([p for p in positions if 0 <= p < size])
        counts.append(sum(p < size + end for p in positions))
    return cells, counts


class Windows:
    """Cells of every window of a plane as an index table, from attributes of a node."""

    def __init__(self, spatial, attrs):
        rank = len(spatial)
        self.spatial = tuple(spatial)
        ones = [1] * rank
        pads = attrs.get("pads", [0] * 2 * rank)
        axes = [axis_windows(spatial[i], attrs["kernel_shape"][i], attrs.get("strides", ones)[i],
                             attrs.get("dilations", ones)[i], pads[i],
                             pads[rank + i], bool(attrs.get("ceil_mode", 0)), attrs.get("auto_pad", "NOTSET"))
                for i in range(rank)]
        self.out = tuple(len(cells) for cells, _ in axes)
        n, most = math.prod(self.out), math.prod(attrs["kernel_shape"])
        self.table = np.full((n, most), math.prod(spatial))  # the cell after the last one stands for none
        self.inside, self.padded = np.zeros(n), np.zeros(n)
        for row, at in enumerate(np.ndindex(*self.out)):
            cells = [np.ravel_multi_index(c, self.spatial)
                     for c in itertools.product(*[axes[i][0][o] for i, o in enumerate(at)])]
            self.table[row, :len(cells)] = cells
            self.inside[row] = len(cells)
            self.padded[row] = math.prod(axes[i][1][o] for i, o in enumerate(at))

    def gather(self, x, filler):
        flat = x.flatten(2)
        flat = torch.cat([flat, torch.full_like(flat[..., :1], filler)], -1)
        return flat[..., torch.from_numpy(self.table)]

    def shaped(self, y):
        return y.reshape(*y.shape[:2], *self.out)

    def maximum(self, x):
        return self.shaped(self.gather(x, -math.inf).amax(-1))

    def mean(self, x, include_pad):
        count = torch.from_numpy(self.padded if include_pad else self.inside).to(x.dtype)
        return self.shaped(self.gather(x, 0).sum(-1) / count)

    def norm(self, x, p):
        return self.shaped((self.gather(x, 0).abs() ** p).sum(-1) ** (1 / p))

    def indices(self, x, storage_order):
        n, c = x.shape[:2]
        best = self.gather(x, -math.inf).argmax(-1)
        cell = torch.from_numpy(self.table)[torch.arange(len(self.table)), best]
        if storage_order:
            at = np.unravel_index(cell.numpy(), self.spatial)
            cell = torch.from_numpy(np.asarray(np.ravel_multi_index(at, self.spatial, order="F")))
        plane = torch.arange(n * c).reshape(n, c, 1) * math.prod(self.spatial)
        return self.shaped(cell + plane)


def by_torch(f):
    def reference(*arrays):
        result = f(*[torch.from_numpy(a) for a in arrays])
        return tuple(r.numpy() for r in result) if isinstance(result, tuple) else result.numpy()

    return reference


def pool_case(op, spatial, attrs, name, **options):
    w = Windows(spatial, attrs)
    if op == "MaxPool":
        f = w.maximum
    elif op == "AveragePool":
        f = lambda x: w.mean(x, attrs.get("count_include_pad", 0))  # noqa: E731
    else:
        f = lambda x: w.norm(x, attrs.get("p", 2))  # noqa: E731
    # two planes go row by row, ten side by side
    return Case(op, [R(2, 1 + len(name) % 2 * 4, *spatial, apart=0.05)], attrs, torch=f, reference=by_torch(f), opset=22, tol=2e-4,
                name=name, **{"alloc": False, **options})


def sampled(count):
    rng = random.Random(SEED)
    while count:
        rank = rng.choice((1, 2, 2, 3))
        op = rng.choice(("MaxPool", "AveragePool", "LpPool"))
        spatial = [rng.randint(3, 9 if rank < 3 else 5) for _ in range(rank)]
        kernel = [rng.randint(1, 3) for _ in range(rank)]
        dilations = [rng.choice((1, 1, 2)) for _ in range(rank)]
        attrs = {"kernel_shape": kernel, "strides": [rng.randint(1, 3) for _ in range(rank)], "dilations": dilations,
                 "ceil_mode": rng.randint(0, 1)}
        auto_pad = rng.choice(("NOTSET", "NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"))
        if auto_pad == "NOTSET":
            attrs["pads"] = [rng.randint(0, (kernel[i % rank] - 1) * dilations[i % rank] // 2) for i in range(2 * rank)]
        else:
            attrs["auto_pad"] = auto_pad
        if op == "AveragePool":
            attrs["count_include_pad"] = rng.randint(0, 1)
        if op == "LpPool":
            attrs["p"] = rng.randint(1, 3)
        if (any((k - 1) * d + 1 > n for k, d, n in zip(kernel, dilations, spatial))
            or not Windows(spatial, attrs).inside.all()):
            continue
        yield pool_case(op, spatial, attrs, f"seed{SEED}-{count}-{spatial}-{attrs}")
        count -= 1


SAMPLED = list(sampled(90))


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_sampled(case):
    run_case(case)


def torch_max(**options):
    return lambda x: (F.max_pool1d, F.max_pool2d, F.max_pool3d)[x.dim() - 3](x, **options)


def torch_mean(**options):
    return lambda x: (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[x.dim() - 3](x, **options)


def nan_input():
    x = np.random.default_rng(3).integers(-2, 3, (1, 2, 6, 7)).astype(np.float64)
    x[0, 0, 2, 3] = x[0, 0, 3, 3] = x[0, 1, 0, 0] = np.nan
    x[0, 1, 3:, 3:] = -np.inf
    return x


TIES = np.random.default_rng(4).integers(0, 2, (2, 3, 9, 17)).astype(np.float64)
CASES = [
    Case("MaxPool", [V(TIES)], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}, fd=False, alloc=False,
         name="ties", torch=torch_max(kernel_size=3, stride=2, padding=1)),
    Case("MaxPool", [V(TIES)], {"kernel_shape": [2, 3], "strides": [1, 1], "dilations": [2, 1]}, fd=False, alloc=False,
         name="ties-dilated", torch=torch_max(kernel_size=(2, 3), stride=1, dilation=(2, 1))),
    Case("MaxPool", [V(TIES.reshape(2, 3, 3, 3, 17))], {"kernel_shape": [2, 2, 3]}, fd=False, alloc=False,
         name="ties-3d", torch=torch_max(kernel_size=(2, 2, 3), stride=1)),
    Case("MaxPool", [V(nan_input())], {"kernel_shape": [3, 3], "strides": [1, 2], "pads": [1] * 4}, fd=False,
         alloc=False, reference=by_torch(torch_max(kernel_size=3, stride=(1, 2), padding=1)), name="NaN and infinity",
         torch=torch_max(kernel_size=3, stride=(1, 2), padding=1)),
    Case("MaxPool", [V(TIES[:, :, :, :16].reshape(24, 3, 4, 3))], {"kernel_shape": [2, 2], "pads": [1] * 4}, fd=False,
         alloc=False, name="ties of small planes", torch=torch_max(kernel_size=2, stride=1, padding=1)),
    Case("MaxPool", [V(np.tile(nan_input(), (5, 4, 1, 1)))], {"kernel_shape": [3, 3], "strides": [1, 2],
                                                              "pads": [1] * 4}, fd=False, alloc=False,
         reference=by_torch(torch_max(kernel_size=3, stride=(1, 2), padding=1)), name="NaN in small planes",
         torch=torch_max(kernel_size=3, stride=(1, 2), padding=1)),
    Case("MaxPool", [R(0, 2, 5, 5)], {"kernel_shape": [2, 2]}, torch=torch_max(kernel_size=2, stride=1),
         name="no images"),
    Case("MaxPool", [R(1, 1, 40, 70)], {"kernel_shape": [5, 5], "pads": [2] * 4, "strides": [3, 3]}, alloc=False,
         name="large", torch=torch_max(kernel_size=5, stride=3, padding=2), fd=False),
    Case("MaxPool", [R(1, 1, 300)], {"kernel_shape": [2], "strides": [70]}, torch=torch_max(kernel_size=2, stride=70),
         fd=False, name="long strides"),
    Case("AveragePool", [R(1, 2, 5, 40)], {"kernel_shape": [3, 4], "pads": [1, 2, 1, 2], "strides": [2, 1]}, fd=False,
         alloc=False, torch=torch_mean(kernel_size=(3, 4), stride=(2, 1), padding=(1, 2), count_include_pad=False),
         name="large"),
    Case("AveragePool", [R(1, 2, 6, 6)], {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [2, 2], "ceil_mode": 1,
                                          "count_include_pad": 1},
         torch=torch_mean(kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=True), opset=19,
         reference=by_torch(torch_mean(kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=True)),
         name="ceil"),
    Case("GlobalMaxPool", [R(2, 3, 4, 5, 2, 2)], torch=lambda x: x.flatten(2).amax(-1)[..., None, None, None, None],
         name="four dims", reference=by_torch(lambda x: x.flatten(2).amax(-1)[..., None, None, None, None])),
    Case("GlobalMaxPool", [V(TIES)], torch=lambda x: F.adaptive_max_pool2d(x, 1), fd=False, alloc=False, name="ties"),
    Case("GlobalMaxPool", [R(2, 3, 17, 23)], torch=lambda x: F.adaptive_max_pool2d(x, 1), fd=False, alloc=False,
         name="long"),
    Case("GlobalMaxPool", [V([[[1.0, np.nan, 3.0, np.nan, 2.0], [-np.inf] * 5]])], torch=lambda x: F.adaptive_max_pool1d(x, 1),
         fd=False, alloc=False, name="NaN", reference=by_torch(lambda x: F.adaptive_max_pool1d(x, 1))),
    Case("GlobalAveragePool", [R(2, 40, 70)], torch=lambda x: x.mean(2, True), fd=False, alloc=False, name="long"),
    *[Case("MaxPool", [R(2, 3, 7, 8, dtype=dtype, low=low, high=100)],
           {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]},
           opset=12, grad=False, alloc=False, name=np.dtype(dtype).name,
           reference=by_torch(lambda x: Windows((7, 8),
                                                {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]})
                              .maximum(x.double()).to(x.dtype))) for dtype, low in ((np.int8, -100), (np.uint8, 0))],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pool(case):
    run_case(case)


def adaptive_case(shape, sizes, x=None, **options):
    f = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(sizes) - 1]
    return Case("AdaptiveAveragePool", [R(*shape) if x is None else V(x), C(sizes)], domain="ai.onnxtrain",
                torch=lambda x, _=None: f(x, sizes), reference=lambda x, _: by_torch(lambda x: f(x, sizes))(x),
                name=f"{shape}-{sizes}", alloc=False, tol=2e-5, **options)


ADAPTIVE = [adaptive_case(shape, sizes) for shape, sizes in (
    ((2, 2, 9), (4,)), ((2, 5, 9), (14,)), ((1, 3, 300), (7,)), ((2, 2, 9, 7), (3, 4)), ((2, 6, 9, 7), (3, 4)),
    ((2, 2, 9, 7), (12, 20)), ((1, 2, 40, 70), (13, 17)), ((1, 2, 40, 70), (8, 3)), ((1, 2, 40, 70), (8, 7)),
    ((2, 2, 28, 31), (7, 1)), ((0, 3, 9, 7), (3, 4)), ((2, 2, 7, 5, 9), (2, 3, 4)),
    ((3, 4, 4, 5, 6), (3, 2, 7)), ((2, 2, 5, 5), (5, 5)), ((2, 2, 5, 5), (1, 1)))]
ADAPTIVE += [adaptive_case((2, 3, 9, 7), (0, 4), grad=False), adaptive_case((2, 0, 9, 7), (3, 4), grad=False),
             adaptive_case("NaN", (4, 5), np.tile(nan_input(), (2, 3, 1, 1)), fd=False)]


@pytest.mark.parametrize("case", ADAPTIVE, ids=str)
def test_adaptive_mean(case):
    run_case(case)


@pytest.mark.parametrize("spatial", [(9,), (7, 6), (4, 5, 6)], ids=str)
@pytest.mark.parametrize("storage_order", [0, 1])
def test_indices(spatial, storage_order):
    rank = len(spatial)
    attrs = {"kernel_shape": [2, 3, 2][:rank], "strides": [2, 1, 2][:rank], "pads": [1, 0, 0][:rank] + [0, 1, 1][:rank]}
    w = Windows(spatial, attrs)
    case = Case("MaxPool", [R(2, 2, *spatial)], attrs | {"storage_order": storage_order}, n_outputs=2, alloc=False,
                torch=lambda x: (w.maximum(x), w.indices(x, storage_order)),
                reference=by_torch(lambda x: (w.maximum(x), w.indices(x, storage_order))))
    run_case(case)


def test_refusals():
    expect_error(Case("MaxPool", [R(1, 1, 4)], {"kernel_shape": [2], "storage_order": 2}), ValueError,
                 "storage_order is 2")
    expect_error(Case("MaxPool", [R(1, 1, 4, 4)], {"kernel_shape": [2]}), ValueError,
                 "kernel_shape has 1 entries, expected 2")
    expect_error(Case("LpPool", [R(1, 1, 4)], {"kernel_shape": [2], "p": 0}), _C.UnsupportedError, "p is 0")
    expect_error(Case("AveragePool", [R(1, 1, 4)], {"kernel_shape": [2], "auto_pad": "SAME"}), ValueError,
                 "auto_pad is 'SAME'")
    for shape, sizes, message in (((1, 1, 4, 4), [2], "1 output sizes for 2 spatial dims"),
                                  ((1, 1, 4), [-1], "output size -1 is not possible for a dim of 4"),
                                  ((1, 1, 0), [2], "output size 2 is not possible for a dim of 0")):
        expect_error(Case("AdaptiveAveragePool", [R(*shape), C(sizes)], domain="ai.onnxtrain"), ValueError, message)
    expect_error(Case("GlobalMaxPool", [R(1, 1, 0)]), ValueError, "planes of the input are empty")
