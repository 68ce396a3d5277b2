"""Reductions of every dtype, over any axes and of nothing have the results of torch."""

import numpy as np
import pytest
import torch
from harness import C, Case, R, V, flat, run_case
from test_elementwise_rows import INTS

REDUCTIONS = {
    "ReduceSum": lambda a: lambda x, _: x.sum(a), "ReduceMean": lambda a: lambda x, _: x.mean(a),
    "ReduceMax": lambda a: lambda x, _: x.amax(a), "ReduceMin": lambda a: lambda x, _: x.amin(a),
    "ReduceL1": lambda a: lambda x, _: x.abs().sum(a), "ReduceL2": lambda a: lambda x, _: x.square().sum(a).sqrt(),
    "ReduceSumSquare": lambda a: lambda x, _: x.square().sum(a), "ReduceLogSum": lambda a: lambda x, _: x.sum(a).log(),
    "ReduceLogSumExp": lambda a: lambda x, _: x.logsumexp(a),
}
CASES = [
    *(flat(op, R(3, 4, dtype=t, low=0, high=3), C([1])) for t in INTS
      for op in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")),
    *(flat(op, R(3, 4, dtype=np.bool_), C([0])) for op in ("ReduceMax", "ReduceMin")),
    *(Case(op, [R(*shape, low=0.1 if op == "ReduceLogSum" else -2, apart=0.05), C(axes)], {"keepdims": 0},
           torch=f(tuple(axes)), fd=False, alloc=False)
      for op, f in REDUCTIONS.items() for shape, axes in (((3, 70, 5), [2]), ((3, 37, 19), [0, 2]), ((5, 3, 300), [1]),
                                                          ((4, 3, 5, 33), [0, 2]), ((5001,), [0]), ((2, 3, 40), [0]),
                                                          ((2, 3, 4), [0, 1]))),
    *(Case(op, [V([[1.0, np.nan, 2], [np.inf, 0, -np.inf], [-np.inf] * 3, [np.inf, np.inf, 1]]), C([1])],
           {"keepdims": 0}, grad=False, reference=lambda x, a, f=f: f((1,))(torch.tensor(x), a).numpy(),
           name="not finite") for op, f in REDUCTIONS.items() if op != "ReduceLogSum"),
    *(flat(op, R(2, 0, dtype=t), C([1]), reference=lambda x, a, v=v: np.full((2, 1), v, x.dtype),
           name=f"of nothing {np.dtype(t)}")
      for op, t, v in (("ReduceMax", np.float32, -np.inf), ("ReduceMin", np.float64, np.inf),
                       ("ReduceMax", np.int32, -2**31), ("ReduceMin", np.int64, 2**63 - 1),
                       ("ReduceMax", np.bool_, False), ("ReduceMin", np.bool_, True),
                       ("ReduceProd", np.int64, 1))),
    Case("ReduceProd", [R(3, 4), C([1])], torch=lambda x, a: x.prod(1, keepdim=True)),
    *(Case("ReduceProd", [R(*shape, low=0.9, high=1.1), C(axes)], {"keepdims": 0}, torch=lambda x, _, d=d: x.prod(d),
           fd=False, alloc=False)
      for shape, axes, d in (((3, 70, 5), [2], 2), ((3, 37, 19), [2], 2), ((5, 3, 300), [1], 1), ((33, 300), [0], 0),
                             ((501,), [0], 0))),
    Case("ReduceProd", [V([[np.nan, 1, 2], [np.inf, 0, 1], [0, -np.inf, 3], [-0.0, 1, 2]] * 10), C([1])], grad=False,
         reference=lambda x, a: torch.tensor(x).prod(1, keepdim=True).numpy(), name="not-finite"),
    Case("ReduceProd", [R(2, 3, 2), C([0, 2])], {"keepdims": 0}, torch=lambda x, a: x.prod(2).prod(0)),
    Case("ReduceProd", [V([[1.0, 0, 3], [0, 2, 0], [4, 5, 6]]), C([1])], torch=lambda x, a: x.prod(1, keepdim=True),
         name="zeros"),
    Case("ReduceProd", [R(2, 0), C([1])], torch=lambda x, a: x.prod(1, keepdim=True), name="empty"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
