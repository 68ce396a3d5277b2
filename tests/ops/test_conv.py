"""Convolution, pooling and batch normalisation against torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, V, call, expect_error, run_case, session_of


def conv(**options):
    def run(x, w, b=None):
        return (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3](x, w, b, **options)

    return run


def max_pool(k, s, p, d, ceil):
    return lambda x: (F.max_pool1d, F.max_pool2d, F.max_pool3d)[x.dim() - 3](x, k, s, p, d, ceil)


def max_with_indices(x):
    """Every window in plain loops: the same geometry as the case that uses it."""
    n, c, h, w = x.shape
    y, at = np.empty((n, c, 4, 6), x.dtype), np.empty((n, c, 4, 6), np.int64)
    for a, b, i, j in np.ndindex(*y.shape):
        cells = [(p, q) for p in range(2 * i - 1, 2 * i + 2) for q in range(j, j + 2) if 0 <= p < h and 0 <= q < w]
        p, q = max(cells, key=lambda cell: x[a, b][cell])  # the first of equals
        y[a, b, i, j], at[a, b, i, j] = x[a, b, p, q], ((a * c + b) * h + p) * w + q
    return y, at


def average_pool(k, s, p, ceil, include):
    return lambda x: (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[x.dim() - 3](x, k, s, p, ceil, include)


def by_torch(f):
    return lambda *arrays: f(*map(torch.from_numpy, arrays)).numpy()


CASES = [
    Case("Conv", [R(2, 3, 7), R(4, 3, 3)], torch=conv()),
    Case("Conv", [R(2, 3, 7, 6), R(4, 3, 3, 2), R(4)], torch=conv()),
    Case("Conv", [R(2, 3, 7, 6), R(4, 3, 3, 3)], {"pads": [1, 1, 1, 1], "strides": [2, 2]},
         torch=conv(padding=1, stride=2)),
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


def transposed(**options):
    def run(y, w, b=None):
        return (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[y.dim() - 3](y, w, b, **options)

    return run


CASES += [
    Case("Conv", [R(2, 16, 9, 9), R(32, 16, 3, 3), R(32)], {"pads": [1, 1, 1, 1]}, torch=conv(padding=1),
         name="blocked",
         alloc=False, tol=1e-4),  # Winograd's errors are relative to the largest entry, 36, not to each
    Case("Conv", [R(2, 32, 10, 10), R(32, 1, 3, 3), R(32)], {"group": 32, "strides": [2, 2]},
         torch=conv(groups=32, stride=2), name="depthwise blocked", alloc=False),
    Case("Conv", [R(0, 2, 5, 5), R(3, 2, 3, 3), R(3)], torch=conv(), name="no images, bias"),
    Case("Conv", [R(1, 2, 9), R(3, 2, 2)], {"strides": [3]}, torch=conv(stride=3), name="cells that no window reads"),
    Case("ConvTranspose", [R(2, 3, 5), R(3, 4, 3), R(4)], torch=transposed()),
    Case("ConvTranspose", [R(2, 3, 4, 5), R(3, 4, 3, 2)], torch=transposed()),
    Case("ConvTranspose", [R(2, 4, 4, 5), R(4, 3, 3, 3), R(6)],
         {"strides": [2, 3], "pads": [1, 0, 1, 0], "group": 2, "output_padding": [1, 2], "dilations": [1, 2]},
         torch=transposed(stride=(2, 3), padding=(1, 0), groups=2, output_padding=(1, 2), dilation=(1, 2)),
         reference=by_torch(transposed(stride=(2, 3), padding=(1, 0), groups=2, output_padding=(1, 2),
                                       dilation=(1, 2)))),
    Case("ConvTranspose", [R(1, 2, 3, 2, 3), R(2, 3, 2, 2, 2)], {"strides": [2, 1, 2]},
         torch=transposed(stride=(2, 1, 2))),
    Case("ConvTranspose", [R(2, 16, 5, 5), R(16, 32, 4, 4), R(32)], {"strides": [2, 2], "pads": [1, 1, 1, 1]},
         torch=transposed(stride=2, padding=1), name="blocked", alloc=False),
]
for rank, size in ((1, (9,)), (2, (7, 6)), (3, (4, 5, 3))):
    for k, s, p, d, ceil in ((2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 2, 1, 1, True), (2, 1, 0, 2, False)):
        attrs = {"kernel_shape": [k] * rank, "strides": [s] * rank, "pads": [p] * 2 * rank, "ceil_mode": int(ceil)}
        name = f"{rank}d-{k}-{s}-{p}-{d}-{ceil}"
        f = max_pool(k, s, p, d, ceil)
        CASES.append(Case("MaxPool", [R(2, 2, *size)], attrs | {"dilations": [d] * rank}, torch=f,
                          reference=by_torch(f), name=name, alloc=rank == 1))
        for include in (False, True) if d == 1 else ():
            f = average_pool(k, s, p, ceil, include)
            CASES.append(Case("AveragePool", [R(2, 2, *size)], attrs | {"count_include_pad": int(include)}, torch=f,
                              reference=by_torch(f), name=f"{name}-{include}", alloc=False))
CASES += [
    Case("MaxPool", [V(np.ones((1, 1, 4, 4)))], {"kernel_shape": [2, 2], "strides": [2, 2]},
         torch=max_pool(2, 2, 0, 1, False), fd=False, name="ties"),
    Case("MaxPool", [R(2, 3, 7, 6)], {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}, n_outputs=2,
         torch=lambda x: F.max_pool2d(F.pad(x, (0, 1, 1, 1), value=-np.inf), (3, 2), (2, 1)),
         reference=max_with_indices, name="indices"),
    Case("AveragePool", [R(1, 2, 7, 6)], {"kernel_shape": [2, 3], "dilations": [2, 1], "pads": [1, 1, 0, 1]}, opset=19,
         name="dilated"),
    Case("MaxPool", [V([[[1.0, np.nan, 2.0, 3.0, -np.inf, -np.inf]]])], {"kernel_shape": [2], "strides": [2]},
         grad=False, reference=lambda x: np.array([[[np.nan, 3.0, -np.inf]]], x.dtype), name="NaN and infinity"),
    Case("GlobalAveragePool", [R(2, 3, 4, 5)], torch=lambda x: x.mean((2, 3), True)),
    Case("GlobalMaxPool", [R(2, 3, 4, 5)], torch=lambda x: x.amax((2, 3), True)),
    *[Case("BatchNormalization", [R(*shape), R(3), R(3), R(3), R(3, low=0.5)], {"epsilon": 2.0**-10}, opset=15,
           grad=[0, 1, 2], tol=1e-4, torch=lambda x, s, b, m, v: F.batch_norm(x, m, v, s, b, False, 0.1, 2.0**-10),
           name=f"inference-{len(shape)}")
      for shape in ((4, 3), (2, 3, 4, 5))],
]


def train_batch_norm(x, s, b, m, v):
    axes = [0, *range(2, x.dim())]
    mean, var = x.mean(axes), x.var(axes, unbiased=False)
    return F.batch_norm(x, None, None, s, b, True, 0.1, 2.0**-10), 0.75 * m + 0.25 * mean, 0.75 * v + 0.25 * var


CASES += [
    Case("BatchNormalization", [R(*shape), R(3), R(3), R(3), R(3, low=0.5)],
         {"epsilon": 2.0**-10, "training_mode": 1, "momentum": 0.75},
         n_outputs=3, opset=15, grad=[0, 1, 2], torch=train_batch_norm, no_grad_outputs=[1, 2], tol=1e-4,
         name=f"training-{len(shape)}")
    for shape in ((4, 3), (2, 3, 4, 5))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conv(case):
    run_case(case)


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_threads_may_change_after_the_program_is_built(before, after):
    case = Case("Conv", [R(4, 16, 12, 12), R(32, 16, 3, 3), R(32)], {"pads": [1, 1, 1, 1]})
    tensors = [torch.from_numpy(spec.make(i)).float() for i, spec in enumerate(case.inputs)]
    session = session_of(case, [t.numpy() for t in tensors])
    dy = torch.from_numpy(R(4, 32, 12, 12).make(9)).float()
    threads, results = torch.get_num_threads(), []
    try:
        for n in (before, after):
            torch.set_num_threads(n)
            results.append(call(session, tensors, bytes([1, 1, 1]), [dy]))
    finally:
        torch.set_num_threads(threads)
    for first, second in zip(*[[*outputs, *grads] for outputs, grads in results], strict=True):
        assert torch.allclose(first, second, rtol=1e-4, atol=1e-4)


def test_window_does_not_fit():
    expect_error(Case("Conv", [R(1, 1, 2, 2), R(1, 1, 3, 3)]), ValueError, "does not fit")


def test_channels_differ():
    expect_error(Case("Conv", [R(1, 2, 5, 5), R(1, 3, 3, 3)]), ValueError, "2 channels")
