"""Number types beyond float: remainders, powers, reductions of every dtype and of nothing; n-gram
counts.
"""


import numpy as np
import pytest
import torch
from harness import C, Case, R, V, expect_error, run_case

INTS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)


def flat(op_type, *inputs, **more):
    return Case(op_type, list(inputs), grad=False, **more)


def old(op, *shapes, torch, **attrs):
    return Case(op, [R(*s, apart=0.3) for s in shapes], attrs, opset=6, torch=torch, reference=lambda *x: torch(
        *[globals()["torch"].tensor(v) for v in x]).numpy(), name=f"opset 6, {attrs}")



REDUCTIONS = {
    "ReduceSum": lambda a: lambda x, _: x.sum(a), "ReduceMean": lambda a: lambda x, _: x.mean(a),
    "ReduceMax": lambda a: lambda x, _: x.amax(a), "ReduceMin": lambda a: lambda x, _: x.amin(a),
    "ReduceL1": lambda a: lambda x, _: x.abs().sum(a), "ReduceL2": lambda a: lambda x, _: x.square().sum(a).sqrt(),
    "ReduceSumSquare": lambda a: lambda x, _: x.square().sum(a), "ReduceLogSum": lambda a: lambda x, _: x.sum(a).log(),
    "ReduceLogSumExp": lambda a: lambda x, _: x.logsumexp(a),
}
COUNTS = dict(mode="TF", min_gram_length=1, max_gram_length=2, ngram_counts=[0, 3], ngram_indexes=[0, 1, 2, 3, 4],
              pool_int64s=[2, 3, 5, 5, 6, 2, 3])
TOKENS = [[1, 2, 3, 5, 5, 6], [2, 0, 3, 0, 2, 3]]

CASES = [
    Case("Mod", [R(3, 4), R(4, apart=0.5)], torch=torch.remainder, fd=False),
    Case("Mod", [R(3, 4), R(4, apart=0.5)], {"fmod": 1}, torch=torch.fmod, fd=False),
    flat("Mod", V([3.0, -3.0, 0.0, -0.0, 5.5]), V([-2.0, 2.0, -1.0, 1.0, np.inf]), name="signs",
         reference=lambda x, y: np.array([-1, 1, -0.0, 0.0, 5.5], x.dtype)),
    *(flat("Mod", R(5, dtype=t, low=0, high=100), R(5, dtype=t, low=1, high=9)) for t in INTS),
    *(flat("Pow", R(4, dtype=np.float32), R(4, dtype=t, low=0, high=4)) for t in INTS),
    flat("Pow", R(4, dtype=np.uint8, low=0, high=4), R(4, dtype=np.uint8, low=0, high=3)),
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
    *(flat("PRelu", R(2, 3, dtype=t, low=lo, high=9), R(3, dtype=t, low=0, high=9))
      for t, lo in ((np.int32, -9), (np.int64, -9), (np.uint32, 0), (np.uint64, 0))),
    flat("Clip", V([1, 2**63, 2**64 - 1], np.uint64), V(2, np.uint64), V(2**63 + 1, np.uint64)),
    flat("IsInf", V([1.0, np.inf, -np.inf, np.nan], np.float16)),
    flat("IsNaN", V([1.0, np.inf, np.nan], np.float16)),
    old("Add", (2, 3, 4), (3,), axis=1, broadcast=1, torch=lambda x, y: x + y[:, None]),
    old("Mul", (2, 3), (3,), broadcast=1, torch=lambda x, y: x * y),
    old("Sub", (2, 3, 4), (2, 3), axis=0, broadcast=1, torch=lambda x, y: x - y[..., None]),
    old("Div", (2, 3), (2, 3), torch=lambda x, y: x / y),
    old("Sum", (2, 3), (2, 3), (2, 3), torch=lambda x, y, z: x + y + z),
    old("PRelu", (2, 3, 4), (3,), torch=lambda x, s: torch.prelu(x, s)),
    old("PRelu", (2, 3), (1,), torch=lambda x, s: torch.prelu(x, s)),
    old("Gemm", (3, 2), (3, 4), (4,), transA=1, broadcast=1, torch=lambda a, b, c: a.T @ b + c),
    Case("BatchNormalization", [R(4, 3, 2), R(3), R(3), R(3), R(3, low=0.5, high=2)], {"is_test": 1}, opset=6,
         grad=[0, 1, 2],
         torch=lambda x, w, b, m, v: torch.nn.functional.batch_norm(x, m, v, w, b), reference=lambda x, w, b, m, v: (
             (x - m[:, None]) / np.sqrt(v[:, None] + 1e-5) * w[:, None] + b[:, None]).astype(x.dtype)),
    *(flat("TfIdfVectorizer", V(TOKENS, t), attrs={**COUNTS, "max_skip_count": k}) for k in (0, 3)
      for t in (np.int32, np.int64)),
    *(flat("TfIdfVectorizer", V(TOKENS, np.int64),
           attrs={**COUNTS, "mode": m, "max_skip_count": 1, "weights": [1.0, 2, 3, 4, 5]})
      for m in ("IDF", "TFIDF")),
    flat("TfIdfVectorizer", V([], np.int64), attrs={**COUNTS, "max_skip_count": 1},
         reference=lambda x: np.zeros(5, np.float32), name="empty"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def test_errors():
    expect_error(Case("Mod", [R(2, dtype=np.uint64), V([1, 0], np.uint64)]), ValueError, "zero")
    expect_error(Case("Add", [R(2, 3), R(3)], opset=6), ValueError, "broadcast is 0")
    expect_error(Case("TfIdfVectorizer", [V([1], np.int64)], {**COUNTS, "pool_strings": ["a"], "max_skip_count": 0}),
                 NotImplementedError, "strings")
    expect_error(Case("TfIdfVectorizer", [V([1], np.int64)], {**COUNTS, "max_skip_count": 0, "ngram_counts": [0, 99]}),
                 ValueError, "ngram_counts")
    expect_error(Case("TfIdfVectorizer", [V([1], np.int64)],
                      {**COUNTS, "max_skip_count": 0, "ngram_indexes": [2**63 - 1, 0, 0, 0, 0]}),
                 ValueError, "ngram_indexes has the entry 9223372036854775807")  # + 1 would wrap: a column before the result
