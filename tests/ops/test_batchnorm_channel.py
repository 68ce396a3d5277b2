"""Statistics of a channel are of differences from its mean, in the widest dtype."""

import numpy as np
import pytest
import torch
from harness import Case, R, call, run_case, session_of
from test_batchnorm import EPS, MOMENTUM, inference, train, training


def test_statistics_far_from_zero():
    """The variance is of the differences from the mean: nothing cancels."""
    offset = train(16, 2, 50, name="offset", dtypes=(np.float32,), alloc=False)
    offset.inputs = [R(16, 2, 50, low=999.0, high=1001.0), *offset.inputs[1:]]
    offset.tol = 2e-3
    run_case(offset)


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
