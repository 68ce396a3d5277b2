"""Normalisations against torch: groups, instances, local response, mean and variance, Lp norms."""


import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, V, call, expect_error, run_case, session_of

EPS = 2.0**-10


def by_torch(f):
    return lambda *arrays: f(*map(torch.from_numpy, arrays)).numpy()


def group(shape, groups, opset=21, name="", **options):
    entries = groups if opset < 21 else shape[1]
    repeat = shape[1] // entries

    def f(x, s, b):
        return F.group_norm(x, groups, s.repeat_interleave(repeat), b.repeat_interleave(repeat), EPS)

    return Case("GroupNormalization", [R(*shape), R(entries), R(entries)], {"num_groups": groups, "epsilon": EPS},
                opset=opset, torch=f, reference=by_torch(f), name=f"{shape}-{groups}-v{opset}{name}",
                **{"alloc": False, "tol": 1e-4, **options})


def instance(shape, opset=22, **options):
    f = lambda x, s, b: F.instance_norm(x, weight=s, bias=b, eps=EPS)  # noqa: E731
    return Case("InstanceNormalization", [R(*shape), R(shape[1]), R(shape[1])], {"epsilon": EPS}, opset=opset, torch=f,
                reference=by_torch(f), name=f"{shape}-v{opset}", **{"alloc": False, "tol": 1e-4, **options})


def response(shape, size, name="", **attrs):
    alpha, beta, bias = attrs.get("alpha", 1e-4), attrs.get("beta", 0.75), attrs.get("bias", 1.0)

    def f(x):
        padded = F.pad(x.square().transpose(1, -1), ((size - 1) // 2, size // 2))
        squares = padded.unfold(-1, size, 1).sum(-1).transpose(1, -1)
        return x / (bias + alpha / size * squares) ** beta

    return Case("LRN", [R(*shape)], {"size": size, **attrs}, torch=f, reference=by_torch(f), alloc=False,
                name=f"{shape}-{size}{name}", tol=1e-4)


def mean_variance(shape, axes):
    def f(x):
        dims = axes or [0, 2, 3]
        return (x - x.mean(dims, True)) / (x.std(dims, unbiased=False, keepdim=True) + 1e-9)

    return Case("MeanVarianceNormalization", [R(*shape)], {"axes": axes} if axes else {}, torch=f,
                reference=by_torch(f), alloc=False, tol=1e-4, name=f"{shape}-{axes}")


def lp(shape, axis, p):
    return Case("LpNormalization", [R(*shape, apart=0.1)], {"axis": axis, "p": p}, opset=22,
                torch=lambda x: F.normalize(x, p, axis, 0),
                reference=by_torch(lambda x: F.normalize(x, p, axis, 0)), alloc=False, name=f"{shape}-{axis}-{p}")


CASES = [
    group((2, 6, 3, 5), 3, alloc=True), group((2, 6, 3, 5), 3, 18, alloc=True), group((3, 8, 20), 2), group((3, 8), 4),
    group((2, 6, 3, 5), 6, 18), group((2, 6, 3, 5), 1, 20), group((2, 4, 2, 3, 4), 2), group((0, 4, 3), 2),
    group((4, 16, 17, 9), 4), group((5, 24, 4, 8), 3), group((2, 8, 33), 4), group((40, 24), 2),
    instance((2, 3, 4, 5), alloc=True), instance((2, 3, 4), 6), instance((1, 2, 2, 3, 4), 1),
    response((2, 5, 3, 4), 3), response((1, 6, 2), 4, alpha=0.5, beta=0.5, bias=2.0),
    response((1, 3, 2, 2), 7, alpha=0.3), response((2, 4), 1, alpha=0.25), response((0, 4, 3), 3),
    mean_variance((2, 3, 4, 5), None), mean_variance((3, 4, 2), [0, -1]), mean_variance((3, 4), [1]),
    lp((3, 4, 2), -1, 2), lp((3, 4, 2), 1, 1), lp((3, 4, 2), 0, 2), lp((5,), 0, 1), lp((2, 0, 3), 2, 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case):
    run_case(case)


def test_groups_far_from_zero():
    case = group((2, 4, 60), 2, name=" offset", dtypes=(np.float32,), tol=2e-3)
    case.inputs = [R(2, 4, 60, low=999.0, high=1001.0), *case.inputs[1:]]
    run_case(case)


@pytest.mark.parametrize("p", [1, 2])
def test_norm_of_zero(p):
    """The specification's zero, and a gradient that is a number."""
    f = lambda x: F.normalize(x, p, -1, 1e-30)  # noqa: E731
    run_case(Case("LpNormalization", [V([[0, 0, 0], [1, -2, 2]])], {"p": p}, opset=22, name=f"zero {p}", alloc=False,
                  grad=False, reference=by_torch(f)))
    case = Case("LpNormalization", [V([[0, 0, 0], [1, -2, 2]])], {"p": p}, opset=22, dtypes=(np.float64,))
    x = torch.tensor([[0, 0, 0], [1, -2, 2]], dtype=torch.float64)
    _, (dx,) = call(session_of(case, [x.numpy()]), [x], b"\1", [torch.ones(2, 3, dtype=torch.float64)])
    assert torch.isfinite(dx).all()


def test_refusals():
    x = R(2, 6, 3)
    expect_error(Case("GroupNormalization", [x, R(6), R(6)], {"num_groups": 4}, opset=21), ValueError,
                 "not divisible into num_groups = 4")
    expect_error(Case("GroupNormalization", [x, R(3), R(6)], {"num_groups": 3}, opset=21), ValueError,
                 "must have 6 entries")
    expect_error(Case("GroupNormalization", [x, R(6), R(6)], {"num_groups": 3}, opset=18), ValueError,
                 "must have 3 entries")
    expect_error(Case("InstanceNormalization", [x, R(3), R(6)], {}), ValueError, "must have 6 entries")
    for bias, groups, message in ((3, 3, "must have 6 entries"), (6, 4, "not divisible")):
        expect_error(Case("GroupNorm", [x, R(6), R(bias)], {"groups": groups}, domain="ai.onnxtrain"), ValueError, message)
    expect_error(Case("LRN", [x], {"size": 0}), ValueError, "size is 0")
    expect_error(Case("LpNormalization", [x], {"p": 3}), ValueError, "p is 3")
    expect_error(Case("MeanVarianceNormalization", [x], {"axes": [1, -2]}), ValueError, "axis 1 twice")
