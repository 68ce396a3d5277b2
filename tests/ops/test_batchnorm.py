"""BatchNormalization: the forms of older opsets, the sizes that break sums, and outputs that are refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Case, R, call, expect_error, run_case, session_of  # noqa: E402
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


def test_statistics_far_from_zero():
    """The variance is of the differences from the mean: nothing cancels."""
    offset = train(16, 2, 50, name="offset", dtypes=(np.float32,), alloc=False)
    offset.inputs = [R(16, 2, 50, low=999.0, high=1001.0), *offset.inputs[1:]]
    offset.tol = 2e-3
    run_case(offset)


def test_outputs_that_are_refused():
    plain = {"epsilon": EPS}
    expect_error(Case("BatchNormalization", operands(4, 3), plain, n_outputs=3, opset=15), ValueError, "training_mode")
    expect_error(Case("BatchNormalization", operands(4, 3), plain, n_outputs=5, opset=9), UnsupportedError,
                 "saved_mean")
    expect_error(Case("BatchNormalization", operands(4, 3), plain | {"training_mode": 1}, n_outputs=5, opset=15),
                 UnsupportedError, "saved_mean")
    expect_error(Case("BatchNormalization", operands(4, 3), plain, opset=6), UnsupportedError, "is_test is 0")


@pytest.mark.parametrize("x, affine, statistics", [
    (np.float16, np.float16, np.float32), (np.float16, np.float32, np.float32), (np.float32, np.float64, np.float32),
    (np.float16, np.float16, np.float16), (np.float64, np.float32, np.float64)], ids=lambda t: t.__name__)
@pytest.mark.parametrize("training_mode", [0, 1])
def test_mixed_dtypes(x, affine, statistics, training_mode):
    """Opset 15: computed in the widest of the dtypes, every result in its own."""
    shapes = [(4, 3, 5), (3,), (3,), (3,), (3,)]
    specs = [R(*shape, dtype=d, low=0.5) for shape, d in zip(shapes, (x, affine, affine, statistics, statistics))]
    def f(*arrays):
        wide = [a.double() for a in map(torch.from_numpy, arrays)]
        results = training(*wide) if training_mode else (inference(*wide),)
        return [r.numpy().astype(d) for r, d in zip(results, (x, statistics, statistics))]
    case = Case("BatchNormalization", specs, {"epsilon": EPS, "momentum": MOMENTUM, "training_mode": training_mode},
                n_outputs=3 if training_mode else 1, opset=15, reference=f, grad=False, alloc=False, tol=2e-3)
    run_case(case)
    arrays = [spec.make(i) for i, spec in enumerate(specs)]
    tensors = [torch.from_numpy(a) for a in arrays]
    outputs, grads = call(session_of(case, arrays), tensors, bytes([1, 1, 1, 0, 0]),
                          [torch.ones(4, 3, 5, dtype=tensors[0].dtype), None, None])
    leaves = [t.double().requires_grad_(i < 3) for i, t in enumerate(tensors)]
    y = training(*leaves)[0] if training_mode else inference(*leaves)
    for got, want in zip(grads, torch.autograd.grad(y, leaves[:3], torch.ones_like(y))):
        torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-3)
        assert got.dtype in (tensors[0].dtype, tensors[1].dtype)
