"""DeformConv against the same reading written with grid_sample; without offsets, against a convolution."""


import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, V, expect_error, run_case

from onnxtrain import UnsupportedError


def deform(x, w, offset, bias=None, mask=None, *, stride=(1, 1), pads=(0, 0, 0, 0), dilation=(1, 1), group=1,
           offset_group=1):
    n, c, h, width = x.shape
    kh, kw = w.shape[2:]
    oh, ow = offset.shape[2:]
    offset = offset.reshape(n, offset_group, kh, kw, 2, oh, ow)
    mask = (torch.ones(n, offset_group, kh, kw, oh, ow).to(x) if mask is None
            else mask.reshape(n, offset_group, kh, kw, oh, ow))
    rows, columns = torch.arange(oh).to(x) * stride[0] - pads[0], torch.arange(ow).to(x) * stride[1] - pads[1]
    read = []
    for i in range(kh):
        for j in range(kw):
            parts = []
            for g in range(offset_group):
                y = rows[:, None] + i * dilation[0] + offset[:, g, i, j, 0]
                at = columns[None, :] + j * dilation[1] + offset[:, g, i, j, 1]
                grid = torch.stack([(2 * at + 1) / width - 1, (2 * y + 1) / h - 1], -1)
                part = x[:, g * c // offset_group:(g + 1) * c // offset_group]
                parts.append(F.grid_sample(part, grid, align_corners=False) * mask[:, g, i, j][:, None])
            read.append(torch.cat(parts, 1))
    columns = torch.stack(read, 2).reshape(n, group, c // group * kh * kw, oh * ow)
    weight = w.reshape(group, w.shape[0] // group, -1)
    y = (weight @ columns).reshape(n, w.shape[0], oh, ow)
    return y if bias is None else y + bias[:, None, None]


def case_of(name, bias=False, mask=False, out=None, image=(4, 5), channels=4, kernel=(3, 2), n=2, **options):
    stride, dilation = options.get("stride", (1, 1)), options.get("dilation", (1, 1))
    pads = options.get("pads", (0, 0, 0, 0))
    size = [(image[d] + pads[d] + pads[d + 2] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in (0, 1)]
    group, offset_group = options.get("group", 1), options.get("offset_group", 1)
    cells = kernel[0] * kernel[1] * offset_group
    inputs = [R(n, channels, *image), R(6, channels // group, *kernel), R(n, 2 * cells, *size, low=-1.3, high=1.3),
              R(6) if bias else None, R(n, cells, *size, low=0, high=1) if mask else None]
    while inputs[-1] is None:
        inputs.pop()
    present = [i for i, spec in enumerate(inputs) if spec is not None]

    def f(*tensors):
        whole = [None] * 5
        for i, t in zip(present, tensors):
            whole[i] = t
        return deform(*whole, **options)

    attrs = {"strides": list(stride), "pads": list(pads), "dilations": list(dilation), "group": group,
             "offset_group": offset_group}
    # the order of sums differs: an entry is a few dozen products
    return Case("DeformConv", inputs, attrs, torch=f, name=name, alloc=name == "plain", tol=2e-4, tol64=1e-10,
                reference=lambda *a: f(*[torch.from_numpy(t) for t in a if t is not None]).numpy())


CASES = [
    case_of("plain"), case_of("bias and mask", True, True), case_of("mask without bias", False, True),
    case_of("strided", True, stride=(2, 1), pads=(1, 0, 2, 1)),
    case_of("dilated", image=(6, 6), dilation=(2, 3), pads=(0, 1, 0, 1)),
    case_of("groups", True, True, group=2), case_of("offset groups", False, True, offset_group=2),
    case_of("both", True, True, group=2, offset_group=4), case_of("no images", n=0),
    case_of("pointwise", kernel=(1, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case):
    run_case(case)


def test_without_offsets_it_is_a_convolution():
    f = lambda x, w, offset: F.conv2d(x, w, padding=1) + offset.sum() * 0  # noqa: E731
    zero = V(torch.zeros(1, 18, 4, 5).numpy())
    run_case(Case("DeformConv", [R(1, 2, 4, 5), R(3, 2, 3, 3), zero], {"pads": [1, 1, 1, 1]}, torch=f, grad=[0, 1],
                  tol=1e-4, alloc=False, reference=lambda x, w, o: f(*map(torch.from_numpy, (x, w, o))).numpy()))


def test_other_ranks():
    run_case(Case("DeformConv", [R(1, 2, 6), R(3, 2, 3), R(1, 3, 4, low=-1.2, high=1.2)], {}, alloc=False, fd=True,
                  name="one dim", tol=1e-3, reference=lambda x, w, o: by_rows(x, w, o)))


def by_rows(x, w, offset):
    """One dim as two, of which the other has one cell and offsets of zero."""
    whole = torch.stack([torch.zeros(offset.shape), torch.from_numpy(offset)], 2).reshape(1, 6, 1, 4)
    whole = whole.to(torch.from_numpy(x).dtype)
    return deform(torch.from_numpy(x)[:, :, None], torch.from_numpy(w)[:, :, None], whole)[:, :, 0].numpy()


def test_refusals():
    x, w, offset = R(1, 4, 4, 4), R(2, 4, 2, 2), R(1, 8, 3, 3)
    expect_error(Case("DeformConv", [x, w, R(1, 4, 3, 3)], {}), ValueError, "the offset does not fit the windows")
    expect_error(Case("DeformConv", [x, w, offset, None, R(1, 3, 3, 3)], {}), ValueError,
                 "the mask does not fit the windows")
    expect_error(Case("DeformConv", [x, w, offset], {"offset_group": 3}), ValueError,
                 "not divisible into offset_group = 3")
    expect_error(Case("DeformConv", [x, w, offset], {"group": 2}), ValueError, "the weight does not fit")
    expect_error(Case("DeformConv", [x, w, offset], {"kernel_shape": [3, 3]}), ValueError,
                 "kernel_shape differs from the shape of the weight")
    expect_error(Case("DeformConv", [x, w, offset, R(3)], {}), ValueError, "the bias does not fit")
    expect_error(Case("DeformConv", [R(1, 2, 3, 3, 3, 3), R(1, 2, 1, 1, 1, 1), R(1, 4, 3, 3, 3, 3)], {}),
                 UnsupportedError, "4 spatial dims")
