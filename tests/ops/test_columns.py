"""Axes that are not the last, in strips of columns, and rows of a few elements, laid out in tiles: every kernel against the others and
torch, around the sizes where strips and tiles end."""


import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, V, call, run_case, session_of

from onnxtrain import _C

FLOAT = {"dtypes": (np.float32,), "alloc": False}
SHAPES = [(2, 3, 7), (2, 3, 8), (3, 5, 2, 130), (1, 4, 256), (2, 1, 257)]
NAN, INF = float("nan"), float("inf")
ODD = V([[NAN, INF, -INF, -INF, 0, 1, 2, 3], [0, 1, -INF, 2, NAN, 1, INF, 3], [1, 2, -INF, INF, NAN, 1, -INF, 3]])


def labels_of(shape, classes):
    return np.random.default_rng(0).integers(0, classes, (shape[0], *shape[2:]))


CASES = [
    *[Case(kind, [R(*shape)], {"axis": 1}, opset=20, torch=lambda x, f=f: f(x, 1), **FLOAT) for shape in SHAPES
      for kind, f in (("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax))],
    *[Case("ReduceLogSumExp", [R(*shape), C([1])], {"keepdims": 0}, opset=20, torch=lambda x, _: x.logsumexp(1), **FLOAT)
      for shape in SHAPES],
    Case("ReduceLogSumExp", [R(3, 4, 2, 9), C([0, 2])], {"keepdims": 0}, opset=20, torch=lambda x, _: x.logsumexp((0, 2)),
         **FLOAT),
    *[Case("SoftmaxCrossEntropyLoss", [R(*shape), V(labels_of(shape, shape[1]), np.int64), R(shape[1], low=0.5)],
           {"reduction": mode, "ignore_index": 0}, n_outputs=2, grad=[0],
           torch=lambda x, t, w, m=mode: (F.cross_entropy(x, t, w, reduction=m, ignore_index=0), F.log_softmax(x, 1)), **FLOAT)
      for shape in (*SHAPES[:4], (700, 2), (300, 10), (260, 48), (5, 49)) for mode in ("mean", "none")],
    Case("Mul", [R(200, 5, 3), R(200, 1, 3)], torch=torch.mul, **FLOAT),
    Case("Add", [R(70, 1, 9), R(1, 11, 1)], torch=torch.add, **FLOAT),
    Case("Less", [R(300, 2), R(300, 1)], torch=torch.lt, grad=False, **FLOAT),
    Case("Where", [R(90, 1, 7, dtype=bool), R(90, 3, 7), R(7)], torch=torch.where, **FLOAT),
    Case("And", [R(600, 2, dtype=bool), R(600, 1, dtype=bool)], torch=torch.logical_and, alloc=False),
    *[Case("Gather", [R(5, 9), V(np.arange(7) - 4, np.int64)], {"axis": 1}, torch=lambda x, i: x[:, i], alloc=False)],
    *[Case("Expand", [R(*lead, 1, dtype=dtype), C([*lead, n])], torch=lambda x, _, n=n: x.expand(*x.shape[:-1], n), alloc=False,
           grad=dtype == np.float32) for lead in ((70,), (9, 700)) for n in (2, 3, 4, 5, 7, 16, 17) for dtype in (np.float32, np.int64)],
    Case("Expand", [R(7, 1, 90, 1), C([7, 3, 90, 2])], torch=lambda x, _: x.expand(7, 3, 90, 2), alloc=False),
    *[Case("Expand", [R(60, 1, 3), C([60, 4, 3])], torch=lambda x, _: x.expand(60, 4, 3), **FLOAT)],
    Case("Transpose", [R(40, 3, 5, 2)], {"perm": [2, 0, 1, 3]}, torch=lambda x: x.permute(2, 0, 1, 3), **FLOAT),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees(case):
    run_case(case)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("kind", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("shape", [(4, 5, 3), (2, 6, 8), (2, 5, 257), (3, 128, 1), (2, 131, 3), (2, 191, 7), (2, 20001, 2)], ids=str)
def test_positions(shape, kind, last):
    """Ties, and NaN as the largest and the smallest, in the float32 kernel and in float64's element by element."""
    values = np.random.default_rng(1).integers(0, 4, shape).astype(np.float32)
    values[0, 2, :3] = values[1, 1, -1] = values[1, 3, -1] = np.nan
    found = []
    for dtype in (np.float32, np.float64):
        case = Case(kind, [R(*shape)], {"axis": 1, "select_last_index": last})
        outputs, _ = call(session_of(case, [values.astype(dtype)]), [torch.from_numpy(values.astype(dtype))], b"\0", None)
        found.append(outputs[0].numpy())
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("shape, k", [((3, 1), 1), ((5, 2), 1), ((40, 16), 16), ((4, 48), 20), ((4, 49), 2), ((4, 49), 48), ((4, 49), 49),
                                      ((3, 1000), 7), ((3, 1000), 500), ((2, 8000), 100), ((0, 5), 2), ((2, 60, 3), 55), ((2, 60, 3), 5)],
                         ids=str)
def test_order(shape, k, largest):
    """TopK of ties, two zeros, NaN of both signs and infinities: float32 by its keys, float64 by comparisons, and whole numbers."""
    values = np.random.default_rng(2).choice([-0.0, 0.0, 1, -1, 1e-40, -3e38, np.inf, -np.inf, np.nan, -np.nan, 7, -7], shape).astype(np.float32)
    whole = np.nan_to_num(values, posinf=2.0**30, neginf=-2.0**30).clip(-2.0**31, 2.0**30)
    for many, dtypes in ((values, (np.float32, np.float64)), (whole, (np.int32, np.int64))):
        found = []
        for dtype in dtypes:
            case = Case("TopK", [R(*shape, dtype=dtype), C([k])], {"axis": 1, "largest": largest}, n_outputs=2)
            x = many.astype(dtype)
            (y, i), _ = call(session_of(case, [x, np.array([k])]), [torch.from_numpy(x)], b"\0", None)
            found.append((y.double().numpy(), i.numpy()))
        np.testing.assert_array_equal(found[0][0], found[1][0])
        np.testing.assert_array_equal(found[0][1], found[1][1])


def test_what_is_not_finite():
    x = torch.from_numpy(ODD.make(0).astype(np.float32))
    for kind, axes, f in (("Softmax", {"axis": 0}, lambda t: t.softmax(0)),
                          ("LogSoftmax", {"axis": 0}, lambda t: t.log_softmax(0)),
                          ("ReduceLogSumExp", {"axes": [0], "keepdims": 0}, lambda t: t.logsumexp(0))):
        case = Case(kind, [R(3, 8)], axes, opset=13)
        (y,), _ = call(session_of(case, [x.numpy()]), [x], b"\0", None)
        torch.testing.assert_close(y, f(x), equal_nan=True)


def test_few_classes_that_are_not_finite():
    """A row of a few classes is laid out among others."""
    x = torch.from_numpy(ODD.make(0).astype(np.float32)).T.repeat(50, 1).contiguous()  # (400, 3)
    label = torch.arange(400) % 3
    case = Case("SoftmaxCrossEntropyLoss", [R(400, 3), R(400, dtype=np.int64)], {"reduction": "none"})
    want_x = x.clone().requires_grad_()
    want = F.cross_entropy(want_x, label, reduction="none")
    want.sum().backward()
    (y,), (dx, _) = call(session_of(case, [x.numpy(), label.numpy()]), [x, label], b"\1\0", [torch.ones(400)])
    torch.testing.assert_close(y, want.detach(), equal_nan=True)
    torch.testing.assert_close(dx, want_x.grad, equal_nan=True)


@pytest.mark.parametrize("kind, f, low, high", [("Log", torch.log, 0, 40), ("Softplus", F.softplus, -30, 30),
                                                ("Sinh", torch.sinh, -88, 88), ("Cosh", torch.cosh, -88, 88)])
def test_math_close_to_double(kind, f, low, high):
    """Within four units of float32's last place, from tiny to large, and what is not finite."""
    edges = [1.2e-38, 1e-30, 1e-3, 1.0, 1.0001, 0.9999, 3e38, INF, -INF, 0.0, -0.0, NAN]
    x = torch.cat([torch.linspace(low, high, 4001), torch.tensor(edges)])
    (y,), _ = call(session_of(Case(kind, [R(*x.shape)]), [x.numpy()]), [x], b"\0", None)
    want = f(x.double())
    finite = want.float().isfinite()
    near = (y.double() - want).abs()[finite] <= 4 * 2.0**-24 * want.abs()[finite] + 1e-37
    assert near.all(), x[finite][~near]
    torch.testing.assert_close(y[~finite], want.float()[~finite], equal_nan=True)


@pytest.mark.skipif(_C.build_info()["isa"] == "plain", reason="libm's logarithm takes a flushed number for 0")
def test_logarithm_of_what_is_flushed():
    x = torch.tensor([1e-39, 1e-44])
    (y,), _ = call(session_of(Case("Log", [R(2)]), [x.numpy()]), [x], b"\0", None)
    torch.testing.assert_close(y.double(), torch.tensor([-89.8008, -101.3327]).double(), rtol=1e-5, atol=0)
