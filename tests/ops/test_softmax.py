"""Softmax and LogSoftmax over one axis have the values and gradients of torch."""

import pytest
import torch.nn.functional as F
from harness import Case, R, run_case
from test_reduce import by_torch


def flattened(x):
    return F.softmax(x.reshape(2, 12), 1).reshape(2, 3, 4)


CASES = [
    *[Case(op, [R(*shape)], {"axis": axis}, torch=lambda x, f=f, a=axis: f(x, a))
      for op, f in (("Softmax", F.softmax), ("LogSoftmax", F.log_softmax))
      for shape, axis in (((3, 5), -1), ((3, 5), 0), ((2, 3, 4), 1), ((1,), 0), ((3, 37), 1), ((0, 4), 1))],
    Case("Softmax", [R(2, 3, 4)], {"axis": 1}, opset=11, torch=flattened, reference=by_torch(flattened),
         name="flattens"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reduce(case):
    run_case(case)
