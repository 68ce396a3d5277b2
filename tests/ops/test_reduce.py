"""Reductions over any axes have the values and gradients of torch."""

import numpy as np
import pytest
import torch
from harness import C, Case, R, V, of_run_time_inputs, run_case


def reduction(f, **defaults):
    def case(op_type, shape, axes, keepdims=1, **more):
        def run(x):
            return f(x, tuple(axes) if axes else tuple(range(x.dim())), bool(keepdims))

        inputs = [R(*shape, **defaults)] + ([C(axes)] if axes else [])
        return Case(op_type, inputs, {"keepdims": keepdims}, torch=run, tol=1e-4, **more)

    return case


def by_torch(f):
    """reference= from torch: the reference evaluator rounds statistics to float32,
    and knows Softmax from opset 13 on.
    """
    return lambda *arrays: f(*map(torch.from_numpy, arrays)).numpy()


SUM = reduction(lambda x, a, k: x.sum(a, k))
MEAN = reduction(lambda x, a, k: x.mean(a, k))
MAX = reduction(lambda x, a, k: x.amax(a, k))
MIN = reduction(lambda x, a, k: x.amin(a, k))
L1 = reduction(lambda x, a, k: x.abs().sum(a, k), apart=0.05)
L2 = reduction(lambda x, a, k: x.square().sum(a, k).sqrt())
SQUARE = reduction(lambda x, a, k: x.square().sum(a, k))
LOG_SUM = reduction(lambda x, a, k: x.sum(a, k).log(), low=0.1)
LSE = reduction(lambda x, a, k: torch.logsumexp(x, a, k))
SHAPES = [((2, 3, 4), [1], 1), ((2, 3, 4), [-1], 0), ((2, 3, 4), [0, 2], 1), ((2, 3, 4), [0, 1], 0), ((5,), None, 0)]

CASES = [make(name, *args, alloc=i == 0) for name, make in [
    ("ReduceSum", SUM), ("ReduceMean", MEAN), ("ReduceMax", MAX), ("ReduceMin", MIN), ("ReduceL1", L1),
    ("ReduceL2", L2), ("ReduceSumSquare", SQUARE), ("ReduceLogSum", LOG_SUM), ("ReduceLogSumExp", LSE)]
         for i, args in enumerate(SHAPES)]
CASES += [
    Case("ReduceSum", [R(2, 3)], {"axes": [1]}, opset=11, torch=lambda x: x.sum(1, True), name="attribute"),
    Case("ReduceSum", [R(2, 3), C([], np.int64)], {"noop_with_empty_axes": 1}, torch=lambda x: x + 0, name="noop"),
    Case("ReduceSum", [R(2, 0), C([1])], torch=lambda x: x.sum(1, True), name="empty"),
    Case("ReduceMax", [V([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), C([1])], torch=lambda x: x.amax(1, True), name="ties"),
    Case("ReduceSum", [R(3, 5, low=-9, high=9, dtype=np.int64), C([0])], grad=False),
    *[Case(op, [R(2, 3, 4, 5, 3, low=-9, high=9, dtype=np.int64), C(axes)], grad=False, torch=lambda x, f=f, a=axes: f(x, a, True),
           name=f"apart {axes}")
      for op, f in (("ReduceSum", torch.sum), ("ReduceMax", torch.amax)) for axes in ([0, 2, 4], [1, 3], [0, 3])],
    *(Case("ReduceSum", [R(4, 30, 700, low=-2**30, high=2**30, dtype=t), C(axes)], {"keepdims": 0}, grad=False,
           alloc=False, reference=lambda x, axes: x.sum(tuple(axes), dtype=x.dtype), name=f"wraps {t.__name__} {axes}")
      for t in (np.int32, np.int64) for axes in ([0], [1], [2], [0, 1], [0, 1, 2])),
    *(Case(name, [R(700, 5, low=0.1), C([1])], {"keepdims": 0}, torch=lambda x, f=f: f(x), alloc=False,
           name="short rows")
      for name, f in (("ReduceSum", lambda x: x.sum(1)), ("ReduceMean", lambda x: x.mean(1)),
                      ("ReduceL1", lambda x: x.abs().sum(1)), ("ReduceL2", lambda x: x.norm(dim=1)),
                      ("ReduceSumSquare", lambda x: x.square().sum(1)),
                      ("ReduceProd", lambda x: x.prod(1)), ("ReduceMax", lambda x: x.amax(1)),
                      ("ReduceMin", lambda x: x.amin(1)),
                      ("ReduceLogSum", lambda x: x.sum(1).log()), ("ReduceLogSumExp", lambda x: x.logsumexp(1)))),
    Case("ReduceLogSumExp",
         [V([[-np.inf, 1.0], [-np.inf, -np.inf], [np.inf, 0.0], [np.nan, 0.0], [800.0, 800.0]]), C([1])],
         {"keepdims": 0}, reference=lambda x, _: torch.from_numpy(x).logsumexp(1).numpy(), grad=False,
         name="short rows, infinite"),
    *(Case("ReduceSum", [R(9, 40, n), C([1])], {"keepdims": 0}, torch=lambda x: x.sum(1), alloc=False,
           name=f"{n} columns")
      for n in range(1, 10)),
    Case("SumTo", [R(4, 2, 3)], {"shape": [2, 1]}, domain="ai.onnxtrain", torch=lambda x: x.sum((0, 2)).reshape(2, 1),
         grad=False),
]


CASES = [of_run_time_inputs(case) for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reduce(case):
    run_case(case)
