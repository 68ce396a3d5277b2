"""BatchNormalization: the forms of older opsets, the sizes that break sums, and outputs that are refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Case, R, expect_error, run_case  # noqa: E402
from onnxtrain import UnsupportedError  # noqa: E402

EPS, MOMENTUM = 2.0**-10, 0.75


def operands(*shape):
    return [R(*shape), R(shape[1]), R(shape[1]), R(shape[1]), R(shape[1], low=0.5)]


def inference(x, s, b, m, v):
    return F.batch_norm(x, m, v, s, b, False, 0.1, EPS)


def training(x, s, b, m, v):
    axes = [0, *range(2, x.dim())]
    mean, var = x.mean(axes), x.var(axes, unbiased=False)
    y = F.batch_norm(x, None, None, s, b, True, 0.1, EPS)
    return y, MOMENTUM * m + (1 - MOMENTUM) * mean, MOMENTUM * v + (1 - MOMENTUM) * var


def by_torch(f):
    def run(*arrays):
        result = f(*map(torch.from_numpy, arrays))
        return [t.numpy() for t in result] if isinstance(result, tuple) else result.numpy()

    return run


def train(*shape, name, **options):
    attrs = {"epsilon": EPS, "momentum": MOMENTUM} | ({"training_mode": 1} if options.get("opset", 15) >= 14 else {})
    return Case("BatchNormalization", operands(*shape), attrs, n_outputs=3, grad=[0, 1, 2], torch=training, tol=1e-4,
                reference=by_torch(training), no_grad_outputs=[1, 2], name=name, **{"opset": 15} | options)


CASES = [
    train(4, 3, 5, opset=9, name="training by outputs"),
    train(4, 3, 5, opset=13, name="training by outputs, v13", alloc=False),
    train(4, 3, 5, opset=14, name="v14", alloc=False),
    train(2, 3, 2, 3, 2, name="five dims", alloc=False),
    train(4, 1, 7, name="one channel", alloc=False),
    train(3, 70, 33, name="many channels", alloc=False),
    *[Case("BatchNormalization", operands(4, 3, 5), {"epsilon": EPS}, opset=opset, grad=[0, 1, 2], torch=inference, tol=1e-4,
           reference=by_torch(inference), name=f"inference v{opset}", alloc=False) for opset in (9, 14, 15)],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batchnorm(case):
    run_case(case)


def test_statistics_far_from_zero():
    """The variance is of the differences from the mean: nothing cancels."""
    offset = train(16, 2, 50, name="offset", dtypes=(np.float32,), alloc=False)
    offset.inputs = [R(16, 2, 50, low=999.0, high=1001.0), *offset.inputs[1:]]
    offset.tol = 2e-3
    run_case(offset)


def test_outputs_that_are_refused():
    plain = {"epsilon": EPS}
    expect_error(Case("BatchNormalization", operands(4, 3), plain, n_outputs=3, opset=15), ValueError, "training_mode")
    expect_error(Case("BatchNormalization", operands(4, 3), plain, n_outputs=5, opset=9), UnsupportedError, "saved_mean")
    expect_error(Case("BatchNormalization", operands(4, 3), plain | {"training_mode": 1}, n_outputs=5, opset=15),
                 UnsupportedError, "saved_mean")
