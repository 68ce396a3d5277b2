"""BatchNormalization: the forms of older opsets, the sizes that break sums, and outputs that are refused."""

import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, expect_error, run_case

from onnxtrain import UnsupportedError

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
    *[Case("BatchNormalization", operands(4, 3, 5), {"epsilon": EPS}, opset=opset, grad=[0, 1, 2], torch=inference,
           tol=1e-4, reference=by_torch(inference), name=f"inference v{opset}", alloc=False) for opset in (9, 14, 15)],
]


def by_cell(f):
    """The same of (N, C * D, 1) cells: statistics of each by itself."""
    def run(x, s, b, m, v):
        y = f(x.flatten(1), *(t.flatten() for t in (s, b, m, v)))
        shapes = (x.shape, s.shape, s.shape)
        return tuple(t.reshape(shape) for t, shape in zip(y, shapes)) if isinstance(y, tuple) else y.reshape(x.shape)
    return run


CELLS = [R(4, 3, 5), R(3, 5), R(3, 5), R(3, 5), R(3, 5, low=0.5)]
for opset in (1, 6, 7):
    test = {"is_test": 1} if opset < 7 else {}
    CASES += [
        Case("BatchNormalization", operands(4, 3, 5), {"epsilon": EPS} | test, opset=opset, grad=[0, 1, 2],
             torch=inference, tol=1e-4, reference=by_torch(inference), name=f"inference v{opset}", alloc=False),
        train(4, 3, 5, opset=opset, name=f"training v{opset}", alloc=False),
        Case("BatchNormalization", CELLS, {"epsilon": EPS, "spatial": 0} | test, opset=opset, grad=[0, 1, 2],
             torch=by_cell(inference), tol=1e-4, reference=by_torch(by_cell(inference)), name=f"by cell v{opset}",
             alloc=opset == 7),
        Case("BatchNormalization", CELLS, {"epsilon": EPS, "momentum": MOMENTUM, "spatial": 0}, opset=opset,
             grad=[0, 1, 2], n_outputs=3, tol=1e-3, torch=by_cell(training), reference=by_torch(by_cell(training)),
             no_grad_outputs=[1, 2], name=f"by cell, training v{opset}",
             alloc=False),
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batchnorm(case):
    run_case(case)


def test_outputs_that_are_refused():
    plain = {"epsilon": EPS}
    expect_error(Case("BatchNormalization", operands(4, 3), plain, n_outputs=3, opset=15), ValueError, "training_mode")
    expect_error(Case("BatchNormalization", operands(4, 3), plain, n_outputs=5, opset=9), UnsupportedError,
                 "saved_mean")
    expect_error(Case("BatchNormalization", operands(4, 3), plain | {"training_mode": 1}, n_outputs=5, opset=15),
                 UnsupportedError, "saved_mean")
    expect_error(Case("BatchNormalization", operands(4, 3), plain, opset=6), UnsupportedError, "is_test is 0")
