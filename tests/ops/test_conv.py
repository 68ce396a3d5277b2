"""Convolution, pooling and batch normalisation against torch."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import C, Case, R, V, expect_error, run_case  # noqa: E402
from onnxtrain import UnsupportedError  # noqa: E402


def conv(**options):
    def run(x, w, b=None):
        return (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3](x, w, b, **options)

    return run


def max_pool(k, s, p, d, ceil):
    return lambda x: (F.max_pool1d, F.max_pool2d, F.max_pool3d)[x.dim() - 3](x, k, s, p, d, ceil)


def average_pool(k, s, p, ceil, include):
    return lambda x: (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[x.dim() - 3](x, k, s, p, ceil, include)


def by_torch(f):
    return lambda *arrays: f(*map(torch.from_numpy, arrays)).numpy()


CASES = [
    Case("Conv", [R(2, 3, 7), R(4, 3, 3)], torch=conv()),
    Case("Conv", [R(2, 3, 7, 6), R(4, 3, 3, 2), R(4)], torch=conv()),
    Case("Conv", [R(2, 3, 7, 6), R(4, 3, 3, 3)], {"pads": [1, 1, 1, 1], "strides": [2, 2]}, torch=conv(padding=1, stride=2)),
    Case("Conv", [R(2, 4, 7, 6), R(6, 2, 3, 3), R(6)], {"group": 2, "dilations": [2, 1], "pads": [2, 1, 2, 1]},
         torch=conv(groups=2, dilation=(2, 1), padding=(2, 1))),
    Case("Conv", [R(2, 4, 5, 5), R(4, 1, 3, 3)], {"group": 4}, torch=conv(groups=4), name="depthwise"),
    Case("Conv", [R(2, 4, 5, 3), R(6, 4, 1, 1), R(6)], torch=conv(), name="pointwise"),
    Case("Conv", [R(1, 2, 4, 5, 4), R(3, 2, 2, 3, 2)], {"strides": [1, 2, 1]}, torch=conv(stride=(1, 2, 1))),
    Case("Conv", [R(1, 2, 5, 6), R(3, 2, 3, 3)], {"auto_pad": "SAME_UPPER"}, torch=conv(padding="same"), name="same"),
    Case("Conv", [R(1, 1, 4, 4), R(1, 1, 3, 3)], {"pads": [0, 0, 2, 1]}, name="uneven padding",
         torch=lambda x, w: F.conv2d(F.pad(x, (0, 1, 0, 2)), w)),
    Case("Conv", [R(0, 2, 5, 5), R(3, 2, 3, 3)], torch=conv(), name="no images"),
]
for rank, size in ((1, (9,)), (2, (7, 6)), (3, (4, 5, 3))):
    for k, s, p, d, ceil in ((2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 2, 1, 1, True), (2, 1, 0, 2, False)):
        attrs = {"kernel_shape": [k] * rank, "strides": [s] * rank, "pads": [p] * 2 * rank, "ceil_mode": int(ceil)}
        name = f"{rank}d-{k}-{s}-{p}-{d}-{ceil}"
        f = max_pool(k, s, p, d, ceil)
        CASES.append(Case("MaxPool", [R(2, 2, *size)], attrs | {"dilations": [d] * rank}, torch=f, reference=by_torch(f),
                          name=name, alloc=rank == 1))
        for include in (False, True) if d == 1 else ():
            f = average_pool(k, s, p, ceil, include)
            CASES.append(Case("AveragePool", [R(2, 2, *size)], attrs | {"count_include_pad": int(include)}, torch=f,
                              reference=by_torch(f), name=f"{name}-{include}", alloc=False))
CASES += [
    Case("MaxPool", [V(np.ones((1, 1, 4, 4)))], {"kernel_shape": [2, 2], "strides": [2, 2]}, torch=max_pool(2, 2, 0, 1, False),
         fd=False, name="ties"),
    Case("GlobalAveragePool", [R(2, 3, 4, 5)], torch=lambda x: x.mean((2, 3), True)),
    Case("GlobalMaxPool", [R(2, 3, 4, 5)], torch=lambda x: x.amax((2, 3), True)),
    *[Case("BatchNormalization", [R(*shape), R(3), R(3), R(3), R(3, low=0.5)], {"epsilon": 2.0**-10}, opset=15, grad=[0, 1, 2], tol=1e-4,
           torch=lambda x, s, b, m, v: F.batch_norm(x, m, v, s, b, False, 0.1, 2.0**-10), name=f"inference-{len(shape)}")
      for shape in ((4, 3), (2, 3, 4, 5))],
]


def train_batch_norm(x, s, b, m, v):
    axes = [0, *range(2, x.dim())]
    mean, var = x.mean(axes), x.var(axes, unbiased=False)
    return F.batch_norm(x, None, None, s, b, True, 0.1, 2.0**-10), 0.75 * m + 0.25 * mean, 0.75 * v + 0.25 * var


CASES += [
    Case("BatchNormalization", [R(*shape), R(3), R(3), R(3), R(3, low=0.5)], {"epsilon": 2.0**-10, "training_mode": 1, "momentum": 0.75},
         n_outputs=3, opset=15, grad=[0, 1, 2], torch=train_batch_norm, no_grad_outputs=[1, 2], tol=1e-4, name=f"training-{len(shape)}")
    for shape in ((4, 3), (2, 3, 4, 5))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conv(case):
    run_case(case)


def test_window_does_not_fit():
    expect_error(Case("Conv", [R(1, 1, 2, 2), R(1, 1, 3, 3)]), ValueError, "does not fit")


def test_channels_differ():
    expect_error(Case("Conv", [R(1, 2, 5, 5), R(1, 3, 3, 3)]), ValueError, "2 channels")
