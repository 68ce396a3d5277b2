"""GatherND and ScatterND read and write the slices at index tuples."""

import numpy as np
import pytest
import torch
from harness import Case, R, V, run_case


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


CASES = [
    Case("GatherND", [R(4, 3, 2), V([[0, 1], [3, -1], [0, 1]], np.int64)], torch=gather_nd(0)),
    Case("GatherND", [R(2, 3, 2), V([[[0], [2]], [[1], [1]]], np.int64)], {"batch_dims": 1}, torch=gather_nd(1)),
    Case("GatherND", [R(2, 2, 3), V([[[0], [2]], [[1], [1]]], np.int64)], {"batch_dims": 2},
         reference=lambda x, i: np.take_along_axis(x, i, 2)[..., 0], name="elements"),
    Case("GatherND", [R(3, 2), R(0, 1, dtype=np.int64)], torch=gather_nd(0), name="none"),
    Case("ScatterND", [R(4, 3), V([[1], [3]], np.int64), R(2, 3)], torch=at_tuples()),
    Case("ScatterND", [R(2, 3, 2), V([[[0, 2], [1, -1]], [[0, 0], [1, 0]]], np.int64), R(2, 2, 2)], torch=at_tuples(),
         name="tuples"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
