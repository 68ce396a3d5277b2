"""Operators by expansion into a few others have the values and gradients of their formulas."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, V, flat, run_case


def shrink(bias, lambd):
    return lambda x: torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


def one_hot(indices, depth, values):
    hot = F.one_hot(torch.where(indices < 0, indices + 5, indices), 5)
    return values[0] * (1 - hot) + values[1] * hot


def scatter_cache(cache, update, where):
    """TensorScatter along axis 1, circular."""
    at = (where[:, None] + torch.arange(update.shape[1])) % cache.shape[1]
    return cache.scatter(1, at[..., None].expand_as(update), update)


CASES = [
    *(Case("Celu", [R(3, 4)], {"alpha": a}, torch=lambda x, a=a: F.celu(x, a),
           reference=lambda x, a=a: F.celu(torch.tensor(x), a))
      for a in (1.0, 0.25, 3.0)),
    Case("Celu", [V([0.0, 1e30, -1e30])], torch=F.celu, name="extremes", dtypes=[np.float64]),
    Case("ThresholdedRelu", [R(3, 4)], {"alpha": 0.5}, torch=lambda x: F.threshold(x, 0.5, 0.0)),
    Case("ThresholdedRelu", [R()], torch=lambda x: F.threshold(x, 1.0, 0.0), name="scalar"),
    *(Case("Shrink", [R(3, 4)], {"bias": b, "lambd": 0.75}, torch=shrink(b, 0.75)) for b in (0.0, 0.75)),
    flat("Shrink", R(7, low=-4, high=4, dtype=np.int32), attrs={"lambd": 1.5, "bias": 1.0}),
    *(flat("Hardmax", R(2, 3, 4), attrs={"axis": a},
           reference=lambda x, a=a: (x == x.max(a, keepdims=True)).astype(x.dtype))
      for a in (0, 1, -1)),
    flat("Hardmax", V([[1.0, 3, 3]]), reference=lambda x: np.array([[0, 1, 0]], x.dtype), name="ties"),
    flat("Hardmax", R(2, 3, 2), opset=11,
         reference=lambda x: np.eye(6, dtype=x.dtype)[x.reshape(2, 6).argmax(1)].reshape(2, 3, 2)),
    flat("Hardmax", R(2, 0), reference=lambda x: x, name="empty"),
    *(Case("LpNormalization", [R(3, 4, apart=0.1)], {"p": p, "axis": a},
           torch=lambda x, p=p, a=a: x / x.norm(p, a, keepdim=True),
           reference=lambda x, p=p, a=a: x / np.linalg.norm(x, p, a, keepdims=True))
      for p in (1, 2) for a in (0, -1)),
    Case("LpNormalization", [V([[0.0, 0], [3, 4]])], grad=False,
         reference=lambda x: np.array([[0, 0], [0.6, 0.8]], x.dtype)),
    Case("SwiGLU", [R(3, 4), R(3, 4)], {"alpha": 1.5}, opset=28, torch=lambda a, b: a * torch.sigmoid(1.5 * a) * b),
    *(Case("OneHot", [V([[0, 4], [-1, 2]], np.int64), C(5), R(2)], {"axis": a},
           torch=lambda i, d, v, a=a: one_hot(i, d, v).movedim(-1, a))
      for a in (-1, 0, 1)),
    flat("OneHot", V([0, 7, -6], np.int64), C(5), V([1.0, 2.0]), reference=lambda i, d, v: np.where(
        np.arange(5) == np.array([[0], [7], [-1]]), v[1], v[0]), name="out of range"),
    flat("OneHot", V([0.0, 2.0], np.float32), C(3.0, np.float32), V([0, 9], np.int32), name="floats"),
    Case("Tile", [R(2, 3), C([2, 3])], torch=lambda x, r: x.tile(2, 3)),
    Case("Tile", [R(2, 1, 3), C([1, 4, 2])], torch=lambda x, r: x.tile(1, 4, 2)),
    Case("Tile", [R(2, 3), C([1, 0])], torch=lambda x, r: x.tile(1, 0), name="nothing"),
    Case("Tile", [R(2, 3), C([1, 1])], torch=lambda x, r: x + 0, name="as it is"),
    Case("Tile", [R(), C([], np.int64)], torch=lambda x, r: x + 0, name="scalar"),
    Case("TensorScatter", [R(2, 5, 3), R(2, 2, 3), V([4, 1], np.int64)], {"mode": "circular", "axis": 1}, opset=24,
         torch=scatter_cache),
    Case("TensorScatter", [R(2, 5, 3), R(2, 2, 3)], opset=24,
         torch=lambda c, u: scatter_cache(c, u, torch.zeros(2, dtype=torch.int64)), name="from the start"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
