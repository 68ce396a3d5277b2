"""GroupNormalization and InstanceNormalization have torch's values and gradients; refusals of normalisations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, expect_error, run_case

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


CASES = [
    group((2, 6, 3, 5), 3, alloc=True), group((2, 6, 3, 5), 3, 18, alloc=True), group((3, 8, 20), 2), group((3, 8), 4),
    group((2, 6, 3, 5), 6, 18), group((2, 6, 3, 5), 1, 20), group((2, 4, 2, 3, 4), 2), group((0, 4, 3), 2),
    group((4, 16, 17, 9), 4), group((5, 24, 4, 8), 3), group((2, 8, 33), 4), group((40, 24), 2),
    instance((2, 3, 4, 5), alloc=True), instance((2, 3, 4), 6), instance((1, 2, 2, 3, 4), 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case):
    run_case(case)


def test_groups_far_from_zero():
    case = group((2, 4, 60), 2, name=" offset", dtypes=(np.float32,), tol=2e-3)
    case.inputs = [R(2, 4, 60, low=999.0, high=1001.0), *case.inputs[1:]]
    run_case(case)


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
