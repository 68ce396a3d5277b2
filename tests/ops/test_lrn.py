"""LRN and MeanVarianceNormalization have the values and gradients of their formulas."""

import pytest
import torch.nn.functional as F
from harness import Case, R, run_case
from test_groupnorm import by_torch


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


CASES = [
    response((2, 5, 3, 4), 3), response((1, 6, 2), 4, alpha=0.5, beta=0.5, bias=2.0),
    response((1, 3, 2, 2), 7, alpha=0.3), response((2, 4), 1, alpha=0.25), response((0, 4, 3), 3),
    mean_variance((2, 3, 4, 5), None), mean_variance((3, 4, 2), [0, -1]), mean_variance((3, 4), [1]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case):
    run_case(case)
