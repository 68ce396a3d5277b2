"""Reductions of one run of dims are exact around the sizes at which their loops change."""

import numpy as np
import pytest
import torch
from harness import C, Case, R, call, session_of

# Around the sizes at which reduce_run.c and sums.c change loops: short rows, narrow columns, parts of a long run.
RUNS = [((5000, 1), 1), ((301, 2), 1), ((70, 3), 1), ((9, 8), 1), ((40, 9), 1), ((40, 15), 1), ((40, 16), 1), ((6, 31), 1), ((6, 33), 1),
        ((3, 65), 1), ((2, 4097), 1), ((100003,), 0), ((31, 3), 0), ((33, 3), 0), ((40001, 3), 0), ((20011, 7), 0), ((3, 8000), 0),
        ((5, 700, 2), 1), ((60, 2, 4), 1), ((3, 9, 5), 1), ((2, 70, 513), 1), ((3, 40001, 1), 1)]


def whole(dtype, shape):
    values = np.random.default_rng(len(shape)).integers(0, 3, shape)
    return (values - (dtype != bool and dtype != np.uint64)).astype(dtype)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.int64, np.uint64, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape, axis", RUNS, ids=str)
def test_run(shape, axis, dtype):
    """Of whole numbers sums are exact in every order, and so are products of few of them."""
    x = whole(dtype, shape)
    few = np.where(np.arange(x.size).reshape(shape) % 97 == 0, x + 1, 1).astype(dtype)
    wanted = [("ReduceMax", x, x.max(axis)), ("ReduceMin", x, x.min(axis))]
    if dtype != bool:
        wanted += [("ReduceSum", x, x.sum(axis, dtype=dtype))]
    if dtype in (np.int32, np.int64, np.uint64):
        wanted += [("ReduceProd", few + 1, (few + 1).prod(axis, dtype=dtype))]
    if dtype in (np.float32, np.float64):
        nan = x.copy()
        nan[(0,) * x.ndim] = nan[(-1,) * x.ndim] = np.nan
        with np.errstate(over="ignore"):
            wanted += [("ReduceMean", x, x.mean(axis, dtype=np.float64).astype(dtype)), ("ReduceMax", nan, nan.max(axis)),
                       ("ReduceMin", nan, nan.min(axis)), ("ReduceProd", few, few.prod(axis, dtype=np.float64).astype(dtype))]
    for op, given, result in wanted:
        session = session_of(Case(op, [R(*shape, dtype=dtype), C([axis])], {"keepdims": 0}, opset=20), [given, np.array([axis])])
        (y,), _ = call(session, [torch.from_numpy(given)], b"\0", None)
        np.testing.assert_allclose(y.numpy(), result, rtol=1e-6 if op == "ReduceMean" else 0, err_msg=op)
