"""Operators built from others, ArgMax, ArgMin, TopK, Pad in all modes, ReverseSequence, EyeLike, windows."""


import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import OURS, C, Case, R, V, expect_error, run_case


def flat(op_type, *inputs, **more):
    return Case(op_type, list(inputs), grad=False, **more)


def pad(pads, mode="constant", value=0.0):
    """torch's pads come from the last dim; the others are in the order of ONNX."""
    n = len(pads) // 2
    turned = [p for d in reversed(range(n)) for p in (pads[d], pads[n + d])]
    if mode == "constant":
        return lambda x, *_: F.pad(x, turned, value=value)
    return lambda x, *_: F.pad(x[None, None], turned, mode=mode)[0, 0]


def numpy_pad(pads, mode):
    n = len(pads) // 2
    return lambda x, *_: np.pad(x, [(pads[d], pads[n + d]) for d in range(n)], mode=mode)


def shrink(bias, lambd):
    return lambda x: torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


def one_hot(indices, depth, values):
    hot = F.one_hot(torch.where(indices < 0, indices + 5, indices), 5)
    return values[0] * (1 - hot) + values[1] * hot


def scatter_cache(cache, update, where):
    """TensorScatter along axis 1, circular."""
    at = (where[:, None] + torch.arange(update.shape[1])) % cache.shape[1]
    return cache.scatter(1, at[..., None].expand_as(update), update)


PADS = [([1, 2, 0, 3], "reflect"), ([2, 1, 1, 0], "edge"), ([2, 3, 3, 1], "wrap")]
TORCH_MODE = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}

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
    *(flat(op, R(3, 4, 2), attrs={"axis": a, "keepdims": k}) for op in ("ArgMax", "ArgMin") for a in (0, 1, -1)
      for k in (0, 1)),
    *(flat("ArgMax", V([3, 1, 3, 0, 0], t), attrs={"select_last_index": s}) for s in (0, 1)
      for t in (np.int8, np.uint32, np.uint64, np.float16)),
    flat("ArgMin", V([3.0, np.nan, 0.0]), reference=lambda x: np.array([1])),
    flat("ArgMax", R(0, 3), attrs={"axis": 1, "keepdims": 0}, name="empty"),
    *(Case("TopK", [R(3, 7), C([3])], {"largest": b}, n_outputs=2, torch=lambda x, k, b=b: x.topk(3, largest=bool(b)))
      for b in (0, 1)),
    Case("TopK", [R(4, 5, 2), C([2])], {"axis": 1}, n_outputs=2, torch=lambda x, k: x.topk(2, 1)),
    Case("TopK", [R(3, 4), C([0])], n_outputs=2, torch=lambda x, k: x.topk(0), name="none"),
    Case("TopK", [R(3, 4), C([4])], n_outputs=1, torch=lambda x, k: x.topk(4)[0], name="values only"),
    flat("TopK", V([1, 2, 2, 1, 2], np.int32), C([4]), n_outputs=2,
         reference=lambda x, k: (np.array([2, 2, 2, 1], np.int32), np.array([1, 2, 4, 0]))),
    flat("TopK", V([1.0, np.nan, 2]), C([2]), n_outputs=2,
         reference=lambda x, k: (np.array([np.nan, 2], x.dtype), np.array([1, 2])), name="nan"),
    *(flat("TorchTopK", R(5, 300, 2, low=0, high=high, dtype=dtype), C([k]), n_outputs=2, domain="ai.onnxtrain",
           attrs={"axis": 1, "largest": largest, "sorted": ordered}, alloc=False, name=f"of {high} numbers",
           reference=lambda x, k, largest=largest, ordered=ordered: tuple(
               y.numpy() for y in torch.from_numpy(x).topk(int(k[0]), 1, bool(largest), bool(ordered))))
      for dtype in (np.float32, np.float64, np.int32, np.int64) for high in (1, 3, 1000)
      for k, largest, ordered in ((0, 1, 1), (1, 1, 1), (4, 0, 1), (5, 1, 1), (40, 1, 0), (200, 0, 1), (300, 1, 1))),
    Case("TorchTopK", [V([[0.0, -0.0, np.nan, 1, np.nan, -0.0, np.inf]] * 2), C([4])], n_outputs=2,
         domain="ai.onnxtrain", torch=lambda x, k: x.topk(4), fd=False),
    *(Case("Pad", [R(3, 4), C(p)], {"mode": m}, torch=pad(p, TORCH_MODE[m]), reference=numpy_pad(p, m))
      for p, m in PADS),
    Case("Pad", [R(3, 4), C([1, 2, 0, 3])], torch=pad([1, 2, 0, 3])),
    Case("Pad", [R(3, 4), C([1, -1, -2, 3])], torch=pad([1, -1, -2, 3]),
         reference=lambda x, p: F.pad(torch.tensor(x), (-1, 3, 1, -2)).numpy(), name="negative"),
    Case("Pad", [R(3, 4), C([1, 2]), V(0.5), C([-1])],
         torch=lambda x, p, v, a: torch.cat([v.expand(3, 1), x, v.expand(3, 2)], 1), name="value and axes"),
    Case("Pad", [R(2, 3)], {"pads": [0, 1, 2, 0], "value": 1.5}, opset=2, torch=pad([0, 1, 2, 0], value=1.5)),
    Case("Pad", [R(0, 3), C([1, 0, 1, 0])], torch=pad([1, 0, 1, 0]), name="empty"),
    Case("Pad", [R(3), C([5, 6])], {"mode": "reflect"}, fd=True, name="several times",
         reference=lambda x, p: np.pad(x, (5, 6), mode="reflect")),
    Case("Pad", [R(), C([], np.int64)], torch=lambda x, p: x + 0, reference=lambda x, p: x, name="scalar"),
    flat("Pad", R(2, 3, dtype=np.int16, low=-9, high=9), C([0, 1, 0, 1]), C(7, np.int16)),
    Case("ReverseSequence", [R(4, 3, 2), V([4, 0, 2], np.int64)], torch=lambda x, n: torch.stack(
        [torch.cat([x[:k, b].flip(0), x[k:, b]]) for b, k in enumerate(n.tolist())], 1)),
    Case("ReverseSequence", [R(2, 3), V([1, 3], np.int64)], {"batch_axis": 0, "time_axis": 1},
         torch=lambda x, n: torch.stack(
[torch.cat([x[b, :k].flip(0), x[b, k:]]) for b, k in enumerate(n.tolist())])),
    flat("EyeLike", R(3, 4, dtype=np.int32, high=2), attrs={"k": 1}),
    flat("EyeLike", R(3, 2), attrs={"k": -1, "dtype": 11}),
    *(flat(op, C(n), attrs={"periodic": p, "output_datatype": 11}, opset=17, tol64=1e-6,
           reference=lambda n, w=w, p=p: getattr(torch, w)(
int(n), periodic=bool(p), dtype=torch.float64).numpy())
      for op, w in (("HannWindow", "hann_window"), ("BlackmanWindow", "blackman_window"))
      for p in (0, 1) for n in (1, 9) if n > 1 or not p),
    flat("HammingWindow", C(8), opset=17),
    # Results that are not folded: a device computes them.
    flat("EyeLike", R(370, 360), attrs={"k": -7, "dtype": 11}, alloc=False, name="large"),
    *(flat(op, C(131_073), attrs={"periodic": p, "output_datatype": 11}, opset=17, alloc=False, name=f"large {p}",
           tol64=1e-6, reference=lambda n, w=w, p=p: getattr(torch, w)(
int(n), periodic=bool(p), dtype=torch.float64).numpy())
      for op, w, p in (("HannWindow", "hann_window", 1), ("BlackmanWindow", "blackman_window", 0))),
    flat("HammingWindow", C(131_073), attrs={"output_datatype": 11}, opset=17, alloc=False, name="large", tol64=1e-6,
         reference=lambda n: torch.hamming_window(int(n), True, 25 / 46, 21 / 46, dtype=torch.float64).numpy()),
]
SORTED = V([-1.0, 0.0, 0.0, 1.0, np.nan]), V([[-2.0, -1.0, -0.0, 0.5], [1.0, 2.0, np.nan, np.inf]])
CASES += [flat("SearchSorted", *operands, attrs={"right": right}, domain=OURS, name=name,
               reference=lambda rows, x, right=right: torch.searchsorted(*map(torch.from_numpy, (rows, x)),
                                                                         right=bool(right)).numpy())
          for right in (0, 1) for name, operands in {
              "one row": SORTED, "rows": (V([[1.0, 2.0, 2.0], [-3.0, 0.0, 9.0]]), V([[2.0, 0.0], [9.0, -9.0]])),
              "integers": (V([1, 3, 3, 5], np.int64), V([0, 3, 9], np.int64)), "none": (V(np.zeros(0)), V([1.0])),
              "int32": (V([1, 3, 3, 5], np.int32), V(3, np.int32))}.items()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def test_errors():
    expect_error(Case("SearchSorted", [R(2, 3), R(3, 4)], domain=OURS), ValueError,
                 "must be one row, or one row for each row of values")
    expect_error(Case("SearchSorted", [R(3), V([1], np.int64)], domain=OURS), TypeError, "the sorted rows are")
    expect_error(Case("TopK", [R(3), C([4])]), ValueError, "k is 4")
    expect_error(Case("Pad", [R(3), C([1])]), ValueError, "1 pads")
    expect_error(Case("Pad", [R(3), C([-2, -2])]), ValueError, "take more")
    expect_error(Case("Pad", [R(3), C([1, 1])], {"mode": "mirror"}), NotImplementedError, "mirror")
    expect_error(Case("ReverseSequence", [R(3, 1), V([4], np.int64)]), IndexError, "length 4")
    expect_error(Case("Tile", [R(3), C([2, 2])]), ValueError, "2 repeats")
    expect_error(Case("ArgMax", [R(0, 3)]), ValueError, "empty")
    expect_error(Case("OneHot", [V([0], np.int64), C(0), R(2)]), ValueError, "depth")
