"""Gathers, scatters with every reduction, running sums and products, bitwise operators."""


import numpy as np
import pytest
import torch
from harness import OURS, C, Case, R, V, expect_error, run_case


def along(axis, reduce=None):
    """torch's scatter along an axis; negative indices count from the end."""

    def compute(x, index, updates):
        index = torch.where(index < 0, index + x.shape[axis], index)
        return x.scatter(axis, index, updates) if reduce is None else x.scatter_reduce(axis, index, updates, reduce)

    return compute


def at_tuples(reduce=None):
    """ScatterND by way of scatter along one flattened dim."""

    def compute(x, index, updates):
        depth = index.shape[-1]
        dims = x.shape[:depth]
        flat = torch.zeros(index.shape[:-1], dtype=torch.int64)
        for d in range(depth):
            flat = flat * dims[d] + torch.where(index[..., d] < 0, index[..., d] + dims[d], index[..., d])
        rows, n = x.reshape(int(np.prod(dims)), -1), index.shape[:-1].numel()
        flat, updates = flat.reshape(-1, 1).expand(-1, rows.shape[1]), updates.reshape(n, rows.shape[1])
        got = rows.scatter(0, flat, updates) if reduce is None else rows.scatter_reduce(0, flat, updates, reduce)
        return got.reshape(x.shape)

    return compute


def gather_nd(batch):
    def compute(x, index):
        if batch == 0:
            return x[tuple(index[..., d] for d in range(index.shape[-1]))]
        return torch.stack([gather_nd(batch - 1)(x[i], index[i]) for i in range(x.shape[0])])

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


REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
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
    *(Case("ScatterElements", [R(4, 3), V(INDEX, np.int64), R(3, 3)], {"reduction": ours}, torch=along(0, theirs),
           opset=18)
      for ours, theirs in REDUCTIONS.items()),
    Case("ScatterElements", [V([1.0, 0, 0, 2]), V([0, 1, 1, 2, 3, 3], np.int64), V([0.0, 3, 2, 4, 0, 0])],
         {"reduction": "mul"}, opset=18, torch=along(0, "prod"), name="zeros in a product"),
    Case("ScatterElements", [V([1.0, 2, 3]), V([0, 0, 1, 1], np.int64), V([1.0, 1, 2, -5])], {"reduction": "max"},
         opset=18, torch=along(0, "amax"), name="ties", fd=False),
    *(Case("ScatterElements", [R(4, dtype=t, low=0, high=9), V([1, 1, 3], np.int64), R(3, dtype=t, low=0, high=5)],
           {"reduction": r}, opset=18, grad=False) for t in (np.int8, np.uint8, np.int64, np.uint32)
      for r in ("add", "max")),
    Case("GatherND", [R(4, 3, 2), V([[0, 1], [3, -1], [0, 1]], np.int64)], torch=gather_nd(0)),
    Case("GatherND", [R(2, 3, 2), V([[[0], [2]], [[1], [1]]], np.int64)], {"batch_dims": 1}, torch=gather_nd(1)),
    Case("GatherND", [R(2, 2, 3), V([[[0], [2]], [[1], [1]]], np.int64)], {"batch_dims": 2},
         reference=lambda x, i: np.take_along_axis(x, i, 2)[..., 0], name="elements"),
    Case("GatherND", [R(3, 2), R(0, 1, dtype=np.int64)], torch=gather_nd(0), name="none"),
    Case("ScatterND", [R(4, 3), V([[1], [3]], np.int64), R(2, 3)], torch=at_tuples()),
    Case("ScatterND", [R(2, 3, 2), V([[[0, 2], [1, -1]], [[0, 0], [1, 0]]], np.int64), R(2, 2, 2)], torch=at_tuples(),
         name="tuples"),
    *(Case("ScatterND", [R(3, 2), V([[1], [0], [1]], np.int64), R(3, 2)], {"reduction": ours}, opset=18,
           torch=at_tuples(theirs))
      for ours, theirs in REDUCTIONS.items()),
    Case("ScatterND", [R(3, 2), R(0, 1, dtype=np.int64), R(0, 2)], {"reduction": "max"}, opset=18,
         torch=at_tuples("amax"), name="none"),
    *(Case("CumSum", [R(2, 4, 3), C(1)], {"exclusive": e, "reverse": r},
           torch=lambda x, a, e=e, r=r: running(x, 1, torch.cumsum, 0.0, e, r)) for e in (0, 1) for r in (0, 1)),
    Case("CumSum", [R(5), C(-1, np.int32)], torch=lambda x, a: x.cumsum(0)),
    Case("CumSum", [R(3, 0), C(0)], torch=lambda x, a: x.cumsum(0), name="empty"),
    Case("CumSum", [R(3, 4, dtype=np.int32, low=-9, high=9), C(1)], grad=False),
    *(Case("CumProd", [R(2, 4, 3), C(1)], {"exclusive": e, "reverse": r}, opset=26,
           torch=lambda x, a, e=e, r=r: running(x, 1, torch.cumprod, 1.0, e, r)) for e in (0, 1) for r in (0, 1)),
    *(Case("TorchCumProd", [R(*shape), C(axis)], {"exclusive": e, "reverse": r}, domain=OURS, alloc=False,
           torch=lambda x, a, e=e, r=r, d=axis: running(x, d, torch.cumprod, 1.0, e, r))
      for shape, axis in (((2, 5, 130), 1), ((19, 6), 1), ((3, 9, 2), 0)) for e in (0, 1) for r in (0, 1)),
    Case("TorchCumProd", [V([[0.0, 1e30, 1e30, 1e30], [1, 0, 2, 0]]), C(1)], domain=OURS,
         torch=lambda x, a: x.cumprod(1), name="ends"),
    Case("CumProd", [V([2.0, 0, 3, 0, 4]), C(0)], opset=26, torch=lambda x, a: x.cumprod(0), name="zeros"),
    *(Case(op, [R(2, 3, dtype=t, low=0, high=100), R(3, dtype=t, low=0, high=100)], grad=False)
      for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor") for t in (np.int8, np.int16, np.uint32, np.int64)),
    Case("BitwiseNot", [R(2, 3, dtype=np.int16, low=-50, high=50)], grad=False),
    *(Case("BitShift", [R(2, 3, dtype=t, low=0, high=100), R(2, 1, dtype=t, low=0, high=8)], {"direction": d},
           grad=False)
      for t in (np.uint8, np.uint16, np.uint32, np.uint64) for d in ("LEFT", "RIGHT")),
    Case("BitShift", [V([-8, -1, 100, -5], np.int8), V([1, 9, -1, 2], np.int8)], {"direction": "RIGHT"}, grad=False,
         reference=lambda x, y: np.array([-4, -1, 0, -2], np.int8), name="signed"),
    Case("BitShift", [V([1, 2, 255], np.uint8), V([8, 200, 1], np.uint8)], {"direction": "LEFT"}, grad=False,
         reference=lambda x, y: np.array([0, 0, 254], np.uint8), name="by the width and more"),
    *(Case("BitCast", [R(3, 5, dtype=t, low=-90, high=90)], {"to": to}, grad=False, opset=26, name=f"of {np.dtype(t)}",
           reference=lambda x, n=n: x.view(n))
      for t, to, n in ((np.float32, 6, np.int32), (np.int64, 11, np.float64), (np.int8, 2, np.uint8),
                       (np.int16, 10, np.float16))),
    Case("BitCast", [V([0, 1, -2, 127], np.int8)], {"to": 9}, grad=False, opset=26, name="to bool",
         reference=lambda x: x != 0),
]


def running(x, axis, op, start, exclusive, reverse):
    x = x.flip(axis) if reverse else x
    if exclusive:
        x = torch.cat([torch.full_like(x.narrow(axis, 0, 1), start), x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    y = op(x, axis)
    return y.flip(axis) if reverse else y




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


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_in_range(dtype):
    limit = C(3, np.int64)
    for values, below in (([0, 2, 1], limit), ([0, 2, 9], C(-1, np.int64))):
        run_case(Case("InRange", [V(values, dtype), below], domain="ai.onnxtrain", torch=lambda i, n: i.clone()))
    for values, position in (([0, 3, 1], 1), ([0, 0, -1], 2)):
        expect_error(Case("InRange", [V(values, dtype), limit], domain="ai.onnxtrain"), IndexError,
                     f"index {values[position]} at position {position} of")
    two = Case("InRange", [V([0], dtype), V([1, 2], np.int64)], domain="ai.onnxtrain")
    expect_error(two, ValueError, "must be one int64")
