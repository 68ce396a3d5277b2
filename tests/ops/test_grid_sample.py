"""GridSample and AffineGrid against torch, in every mode and padding,
with the gradients to the image and to the grid.
"""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, V, call, expect_error, run_case, session_of

from onnxtrain import UnsupportedError

NAMES = {"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"}


def sample(mode, padding, corners):
    return lambda x, grid: F.grid_sample(x, grid, NAMES[mode], padding, bool(corners))


def case_of(shape, points, mode, padding, corners, opset=20, **options):
    f = sample(mode, padding, corners)
    attrs = {"mode": mode if opset >= 20 else NAMES[mode], "padding_mode": padding, "align_corners": corners}
    grid = R(shape[0], *points, len(points), low=-1.6, high=1.6)
    return Case("GridSample", [R(*shape), grid], attrs, torch=f, opset=opset, tol=2e-4, tol64=1e-10,
                reference=lambda x, g: f(torch.from_numpy(x), torch.from_numpy(g)).numpy(),
                name=f"{shape}-{points}-{mode}-{padding}-{corners}-v{opset}", **{"alloc": False, **options})


ALL = list(itertools.product(("nearest", "linear", "cubic"), ("zeros", "border", "reflection"), (0, 1)))
CASES = [case_of((2, 3, 5, 4), (3, 6), *kind) for kind in ALL]
CASES += [case_of((2, 2, 3, 4, 5), (2, 3, 4), *kind) for kind in ALL if kind[0] != "cubic"]
CASES += [case_of((1, 2, 1, 4), (3, 2), *kind) for kind in ALL]  # one row
CASES += [case_of((1, 2, 5, 4), (3, 6), mode, "zeros", 0, opset=16) for mode in NAMES]
CASES += [case_of((1, 2, 4, 4), (2, 3), "linear", "zeros", 0, alloc=True),
          case_of((0, 2, 4, 4), (2, 3), "linear", "zeros", 0),
          case_of((1, 2, 4, 4), (0, 3), "linear", "zeros", 0),
          case_of((2, 5, 30, 40), (50, 20), "linear", "zeros", 0, fd=False),
          case_of((2, 3, 2, 2), (20, 9), "linear", "border", 1, fd=False)]  # whose corners many points read


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case):
    run_case(case)


def by_rows(mode, padding, corners):
    """One spatial dim as torch's two, of which the other has one cell."""
    def f(x, grid):
        whole = torch.cat([grid[:, None], torch.zeros_like(grid[:, None])], -1)
        return F.grid_sample(x[:, :, None], whole, NAMES[mode], padding, bool(corners))[:, :, 0]
    return f


def one_dim(mode, padding, corners):
    f = by_rows(mode, padding, corners)
    return Case("GridSample", [R(2, 3, 5), R(2, 7, 1, low=-1.6, high=1.6)],
                {"mode": mode, "padding_mode": padding, "align_corners": corners}, torch=f, tol=2e-4, alloc=False,
                reference=lambda x, g: f(torch.from_numpy(x), torch.from_numpy(g)).numpy(),
                name=f"one dim-{mode}-{padding}-{corners}")


def nowhere(mode, padding):
    """Not a number and infinity are not turned into zeros; what is only far away is."""
    f = sample(mode, padding, 0)
    grid = V([[[[np.nan, 0], [np.inf, 0], [0, -np.inf], [1e30, 1e30], [0, 0]]]])
    return Case("GridSample", [R(1, 2, 3, 3), grid], {"mode": mode, "padding_mode": padding}, torch=f, grad=[0],
                alloc=False, fd=False, name=f"nowhere-{mode}",
                reference=lambda x, g: f(torch.from_numpy(x), torch.from_numpy(g)).numpy())


OTHERS = [one_dim(*kind) for kind in ALL if kind[0] != "cubic"] + [nowhere(mode, "zeros") for mode in NAMES]
# torch has no such mode: along each axis in turn it is the cubic of the other tests.
OTHERS += [Case("GridSample", [R(1, 2, 3, 4, 3), R(1, 2, 2, 2, 3, low=-1, high=1)],
                {"mode": "cubic", "padding_mode": "border"}, tol=1e-3, tol64=1e-5, alloc=False,
                name="cubic, three dims")]


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_cases(case):
    run_case(case)


@pytest.mark.parametrize("mode, padding", [("linear", "zeros"), ("cubic", "zeros")])
def test_points_nowhere_read_no_cell(mode, padding):
    """What they give is no number, but no cell of the image has a share in it."""
    f = sample(mode, padding, 0)
    x, grid = torch.randn(1, 2, 3, 3), torch.tensor([[[[np.nan, 0], [np.inf, 0], [0, -np.inf], [0.3, 0.2]]]])
    session = session_of(Case("GridSample", [R(1, 2, 3, 3), R(1, 1, 4, 2)], {"mode": mode, "padding_mode": padding}),
                         [x.numpy(), grid.numpy()])
    outputs, grads = call(session, [x, grid], b"\1\0", [torch.ones(1, 2, 1, 4)])
    want = x.clone().requires_grad_(True)
    y = f(want, grid)
    y.sum().backward()
    torch.testing.assert_close(outputs[0], y.detach(), equal_nan=True)
    torch.testing.assert_close(grads[0], want.grad)


def test_cubic_points_nowhere_at_a_border():
    f = sample("cubic", "border", 0)
    x, grid = torch.randn(1, 2, 3, 3), torch.tensor([[[[np.nan, 0], [np.inf, 0], [0, -np.inf], [0.3, 0.2]]]])
    case = Case("GridSample", [R(1, 2, 3, 3), R(1, 1, 4, 2)], {"mode": "cubic", "padding_mode": "border"})
    session = session_of(case, [x.numpy(), grid.numpy()])
    torch.testing.assert_close(call(session, [x, grid], bytes(2), None)[0][0], f(x, grid), equal_nan=True)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0")
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 1, 1, 3), (2, 3, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("corners", [0, 1])
def test_affine_grid(size, corners):
    reference = lambda t, s: F.affine_grid(torch.from_numpy(t), size, bool(corners)).numpy()  # noqa: E731
    run_case(Case("AffineGrid", [R(size[0], len(size) - 2, len(size) - 1), C(size)], {"align_corners": corners},
                  name=f"{size}-{corners}", torch=lambda t, s: F.affine_grid(t, size, bool(corners)),
                  reference=reference, alloc=size == (2, 3, 4, 5)))


def test_refusals():
    x, grid = R(1, 2, 3, 3), R(1, 2, 2, 2)
    expect_error(Case("GridSample", [x, grid], {"mode": "area"}), ValueError, "mode is 'area'")
    expect_error(Case("GridSample", [x, grid], {"padding_mode": "wrap"}), ValueError, "padding_mode is 'wrap'")
    expect_error(Case("GridSample", [x, R(1, 2, 2, 3)], {}), ValueError,
                 "the grid does not fit an input of 2 spatial dims")
    expect_error(Case("GridSample", [R(1, 2, 3, 3, 3, 3), R(1, 2, 2, 2, 2, 4)], {}), UnsupportedError, "4 spatial dims")
    expect_error(Case("GridSample", [R(1, 2, 0, 3), grid], {}), ValueError, "planes of the input are empty")
    expect_error(Case("AffineGrid", [R(1, 2, 3), C([1, 1, 3])], {}), ValueError, "size has 3 entries")
    expect_error(Case("AffineGrid", [R(1, 2, 4), C([1, 1, 3, 3])], {}), ValueError,
                 "theta does not have the shape (1, 2, 3)")


def test_nearest_has_no_slope():
    """The grid's gradient is zero, beside cells that are infinite as well."""
    x, grid = torch.randn(1, 2, 4, 5), torch.rand(1, 3, 6, 2) * 2 - 1
    x[0, 0, 1], x[0, 1, 2, 2] = math.inf, math.nan
    case = Case("GridSample", [R(*x.shape), R(*grid.shape)], {"mode": "nearest"})
    leaves = [t.clone().requires_grad_() for t in (x, grid)]
    want = F.grid_sample(*leaves, mode="nearest", align_corners=False)
    want.sum().backward()
    (y,), grads = call(session_of(case, [x.numpy(), grid.numpy()]), [x, grid], b"\1\1", [torch.ones(1, 2, 3, 6)])
    torch.testing.assert_close(y, want.detach(), equal_nan=True)
    for got, leaf in zip(grads, leaves):
        torch.testing.assert_close(got, leaf.grad)
