"""GatherElements and ScatterElements take an index for each element along an axis; indices that are out of range."""

import numpy as np
import pytest
import torch
from harness import Case, R, V, expect_error, run_case


def along(axis, reduce=None):
    """torch's scatter along an axis; negative indices count from the end."""

    def compute(x, index, updates):
        index = torch.where(index < 0, index + x.shape[axis], index)
        return x.scatter(axis, index, updates) if reduce is None else x.scatter_reduce(axis, index, updates, reduce)

    return compute


def lines_case(op, axis, data, index, dtype):
    """Indices from both ends along lines of these shapes, against torch."""
    gather = op == "GatherElements"

    def f(x, i, *updates):
        i = torch.where(i < 0, i + data[axis], i).long()
        return x.gather(axis, i) if gather else x.scatter_add(axis, i, *updates)

    return Case(op, [R(*data), R(*index, low=-data[axis], high=data[axis], dtype=dtype), *([] if gather else [R(*index)])],
                {"axis": axis} | ({} if gather else {"reduction": "add"}), torch=f, alloc=False,
                reference=lambda *arrays: f(*map(torch.from_numpy, arrays)).numpy())


def put(x, index, updates):
    """ScatterElements along axis 0 in NumPy."""
    y = x.copy()
    np.put_along_axis(y, index, updates, 0)
    return y


INDEX = [[0, 2, 1], [3, 0, -1], [0, 2, 1]]  # (3, 3) into 4 entries; row 2 repeats row 0

CASES = [
    Case("GatherElements", [R(4, 3), V(INDEX, np.int64)], {"axis": 0},
         torch=lambda x, i: x.gather(0, torch.where(i < 0, i + 4, i))),
    Case("GatherElements", [R(2, 3, 4), V([[[0], [1], [3]], [[2], [2], [0]]], np.int64)], {"axis": -1},
         torch=lambda x, i: x.gather(2, i), reference=lambda x, i: np.take_along_axis(x, i, 2), name="last axis"),
    Case("GatherElements", [R(2, 3, 4), R(1, 3, 2, high=2, low=0, dtype=np.int32)], {"axis": 0},
         torch=lambda x, i: x.gather(0, i.long()), reference=lambda x, i: np.take_along_axis(x[:, :, :2], i, 0),
         name="fewer indices"),
    # rows of 5 that go many at a time, rows with fewer indices, lines of a part, a few neighbours, many
    *(lines_case(op, axis, data, index, dtype) for op in ("GatherElements", "ScatterElements")
      for axis, data, index, dtype in ((1, (900, 5), (900, 5), np.int64), (1, (700, 7), (650, 2), np.int32),
                                       (2, (3, 5, 9), (3, 4, 8), np.int64), (1, (4, 50, 3), (4, 40, 3), np.int32),
                                       (1, (4, 6, 17), (3, 5, 17), np.int64))),
    Case("GatherElements", [R(3, 4), R(0, 4, dtype=np.int64)], torch=lambda x, i: x.gather(0, i), name="none"),
    Case("ScatterElements", [R(4, 3), V(INDEX[:2], np.int64), R(2, 3)], torch=along(0)),
    Case("ScatterElements", [R(2, 4, 3), V([[[0, 3, 1]], [[2, 1, 0]]], np.int64), R(2, 1, 3)], {"axis": 1},
         torch=along(1)),
    Case("Scatter", [R(4, 3), V(INDEX[:2], np.int64), R(2, 3)], opset=9, torch=along(0), reference=put),
    Case("ScatterElements", [R(4, 3), R(0, 3, dtype=np.int64), R(0, 3)], {"reduction": "add"}, torch=along(0, "sum"),
         name="none"),
    *(Case("BitCast", [R(3, 5, dtype=t, low=-90, high=90)], {"to": to}, grad=False, opset=26, name=f"of {np.dtype(t)}",
           reference=lambda x, n=n: x.view(n))
      for t, to, n in ((np.float32, 6, np.int32), (np.int64, 11, np.float64), (np.int8, 2, np.uint8),
                       (np.int16, 10, np.float16))),
    Case("BitCast", [V([0, 1, -2, 127], np.int8)], {"to": 9}, grad=False, opset=26, name="to bool",
         reference=lambda x: x != 0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def test_errors():
    expect_error(Case("GatherElements", [R(4, 3), V([[4, 0, 0]], np.int64)]), IndexError, "index 4")
    expect_error(Case("ScatterElements", [R(4), V([-5], np.int64), R(1)]), IndexError, "index -5")
    for value in (5, -6):  # in a row far behind
        index = np.zeros((5000, 2), np.int64)
        index[4000, 1] = index[4500, 0] = value
        expect_error(Case("GatherElements", [R(5000, 5), V(index, np.int64)], {"axis": 1}), IndexError,
                     f"index {value} at position 8001")
    expect_error(Case("ScatterND", [R(4, 2), V([[4]], np.int64), R(1, 2)]), IndexError, "index 4")
    expect_error(Case("GatherND", [R(4, 2), V([[0, 2]], np.int64)]), IndexError, "index 2")
    expect_error(Case("ScatterND", [R(4, 2), V([[1]], np.int64), R(2, 2)]), ValueError, "updates")
    expect_error(Case("BitShift", [R(2, dtype=np.uint8), R(2, dtype=np.uint8)], {"direction": "UP"}), ValueError, "UP")


TORCHS = {  # lookups whose indices do not count from the end
    "TorchGather": ([4, 0, 4], [], lambda x, i: x[i]),
    "TorchGatherElements": ([[4, 0, 1]], [], lambda x, i: x.gather(0, i)),
    "TorchScatterElements": ([[4, 0, 1]], [R(1, 3)], lambda x, i, v: x.scatter(0, i, v)),
}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("index", [-1, 5])
def test_indices_do_not_count_from_the_end(name, index):
    good, more, torch_function = TORCHS[name]
    run_case(Case(name, [R(5, 3), V(good, np.int64), *more], domain="ai.onnxtrain", torch=torch_function))
    bad = V(np.full_like(good, index), np.int64)
    case = Case(name, [R(5, 3), bad, *more], domain="ai.onnxtrain")
    expect_error(case, IndexError, f"index {index} at position 0")
