"""ConvTranspose with every way of stating its size, against torch's full result cut and padded as the specification
says.

The grid is sampled; ONNXTRAIN_TEST_SEED fixes it and is in each case's name.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, expect_error, run_case
from seeds import fixed_seed

from onnxtrain import UnsupportedError

SEED = fixed_seed()


def sides(i, size, kernel, attrs):
    """Cells cut off in front and behind along dim i (negative: zeros added)."""
    rank, s = len(attrs["strides"]), attrs["strides"][i]
    extra = attrs.get("output_padding", [0] * rank)[i]
    full = (size - 1) * s + (kernel - 1) * attrs.get("dilations", [1] * rank)[i] + 1
    auto_pad = attrs.get("auto_pad", "NOTSET")
    pads = attrs.get("pads", [0] * 2 * rank)
    if "output_shape" in attrs or auto_pad.startswith("SAME"):
        wanted = attrs["output_shape"][i] if "output_shape" in attrs else size * s
        total = max(0, full + extra - wanted)
        front = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        return front, full - front - wanted
    if auto_pad == "VALID":
        return 0, -extra
    return pads[i], pads[rank + i] - extra


def full_then_cut(attrs):
    def run(x, w, b=None):
        rank = x.dim() - 2
        f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        y = f(x, w, None, attrs["strides"], 0, 0, attrs.get("group", 1), attrs.get("dilations", 1))
        cut = [sides(i, x.shape[2 + i], w.shape[2 + i], attrs) for i in range(rank)]
        y = F.pad(y, [-c for front, behind in reversed(cut) for c in (front, behind)])
        return y if b is None else y + b.reshape(-1, *[1] * rank)

    return run


def by_torch(f):
    return lambda *arrays: f(*map(torch.from_numpy, arrays)).numpy()


def case_of(spatial, channels, out_channels, kernel, attrs, bias, name, **options):
    f = full_then_cut(attrs)
    group = attrs.get("group", 1)
    inputs = [R(2, channels, *spatial), R(channels, out_channels // group, *kernel)]
    inputs += [R(out_channels)] if bias else []
    return Case("ConvTranspose", inputs, attrs, torch=f, reference=by_torch(f), name=name, opset=22, tol=1e-4,
                **{"alloc": False, **options})


def sampled(count):
    rng = random.Random(SEED)
    while count:
        rank = rng.choice((1, 2, 2, 3))
        spatial = [rng.randint(1, 5 if rank < 3 else 3) for _ in range(rank)]
        kernel = [rng.randint(1, 3) for _ in range(rank)]
        attrs = {"strides": [rng.randint(1, 3) for _ in range(rank)]}
        if rng.random() < 0.5:
            attrs["dilations"] = [rng.randint(1, 2) for _ in range(rank)]
        if rng.random() < 0.4:
            attrs["group"] = 2
        if rng.random() < 0.5:
            attrs["output_padding"] = [rng.randint(0, 3) for _ in range(rank)]
        form = rng.choice(("pads", "auto_pad", "output_shape", "both"))
        if form == "pads":
            attrs["pads"] = [rng.randint(0, 2) for _ in range(2 * rank)]
        if form in ("auto_pad", "both"):
            attrs["auto_pad"] = rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
        if form in ("output_shape", "both"):
            attrs["output_shape"] = [rng.randint(1, 12) for _ in range(rank)]
        full = [(n - 1) * s + (k - 1) * d + 1
                for n, s, k, d in zip(spatial, attrs["strides"], kernel, attrs.get("dilations", [1] * rank))]
        cut = [sides(i, spatial[i], kernel[i], attrs) for i in range(rank)]
        # torch.nn.functional.pad cannot cut away more than there is
        if any(n - front - behind < 1 or front >= n or behind >= n for n, (front, behind) in zip(full, cut)):
            continue
        yield case_of(spatial, 4, 4, kernel, attrs, rng.random() < 0.5,
                      f"seed{SEED}-{count}-{spatial}-{kernel}-{attrs}")
        count -= 1


SAMPLED = list(sampled(40))


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_sampled(case):
    run_case(case)


CASES = [
    case_of((3, 3), 1, 2, (3, 3), {"strides": [3, 2], "output_shape": [10, 8]}, False, "output_shape"),
    case_of((3, 3), 1, 2, (3, 3), {"strides": [3, 2], "output_shape": [10, 8], "output_padding": [1, 1]}, True,
            "output_shape and output_padding"),
    case_of((3,), 2, 3, (2,), {"strides": [2], "output_shape": [11]}, True, "output_shape beyond the windows",
            alloc=True),
    case_of((3, 3), 2, 2, (3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}, True, "same", alloc=True),
    case_of((2, 2), 2, 2, (3, 3), {"strides": [1, 1], "dilations": [3, 3], "output_padding": [2, 2]}, True,
            "output_padding from the dilation", alloc=False),
    Case("ConvTranspose", [R(0, 2, 4, 4), R(2, 3, 3, 3), R(3)], {"strides": [2, 2]}, name="no images",
         torch=lambda x, w, b: F.conv_transpose2d(x, w, b, 2),
         reference=by_torch(lambda x, w, b: F.conv_transpose2d(x, w, b, 2))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conv_transpose(case):
    run_case(case)


def test_four_entries_of_output_shape():
    f = full_then_cut({"strides": [3, 2], "output_shape": [10, 8]})
    run_case(Case("ConvTranspose", [R(1, 1, 3, 3), R(1, 2, 3, 3)], {"strides": [3, 2], "output_shape": [1, 2, 10, 8]},
                  torch=f, reference=by_torch(f), tol=1e-4, alloc=False))


def test_refusals():
    shapes = [R(1, 2, 5, 5), R(2, 3, 3, 3)]
    expect_error(Case("ConvTranspose", shapes, {"auto_pad": "SAME"}), ValueError, "auto_pad is 'SAME'")
    expect_error(Case("ConvTranspose", shapes, {"output_shape": [9]}), ValueError, "output_shape has 1 entries")
    expect_error(Case("ConvTranspose", shapes, {"output_shape": [0, 4]}), ValueError, "the result has 0 cells")
    expect_error(Case("ConvTranspose", shapes, {"strides": [0, 1]}), ValueError, "strides[0] is 0")
    expect_error(Case("ConvTranspose", shapes, {"pads": [4, 4, 4, 4]}), ValueError, "the result has -1 cells")
    expect_error(Case("ConvTranspose", [R(1, 3, 5), R(2, 3, 3)]), ValueError, "channels")
    expect_error(Case("ConvTranspose", [R(1, 2, 5), R(2, 3, 3), R(4)]), ValueError, "bias")
    expect_error(Case("ConvTranspose", [R(1, 2, 2, 2, 2, 2), R(2, 3, 1, 1, 1, 1)]), UnsupportedError, "4 spatial dims")


def test_sizes_of_torch():
    """What torch accepts, its own arguments: the attributes name the same geometry."""
    for stride, padding, extra, dilation in ((2, 1, 1, 1), (3, 0, 2, 2), (1, 2, 1, 2)):
        attrs = {"strides": [stride] * 2, "pads": [padding] * 4, "output_padding": [extra] * 2,
                 "dilations": [dilation] * 2}
        f = lambda x, w: F.conv_transpose2d(x, w, None, stride, padding, extra, 1, dilation)  # noqa: B023, E731
        x, w = torch.randn(1, 2, 4, 4), torch.randn(2, 3, 3, 3)
        assert torch.allclose(f(x, w), full_then_cut(attrs)(x, w), atol=1e-5)
        run_case(Case("ConvTranspose", [R(1, 2, 4, 4), R(2, 3, 3, 3)], attrs, torch=f, reference=by_torch(f), tol=1e-4,
                      alloc=False))
