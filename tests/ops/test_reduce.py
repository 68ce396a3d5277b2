"""Reductions, softmax, layer normalisation, Gather, and the loss operators."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, V, call, check_forward, expect_error, run_case, session_of

from onnxtrain import _C


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


def flattened(x):
    return F.softmax(x.reshape(2, 12), 1).reshape(2, 3, 4)


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
    *[Case(op, [R(*shape)], {"axis": axis}, torch=lambda x, f=f, a=axis: f(x, a))
      for op, f in (("Softmax", F.softmax), ("LogSoftmax", F.log_softmax))
      for shape, axis in (((3, 5), -1), ((3, 5), 0), ((2, 3, 4), 1), ((1,), 0), ((3, 37), 1), ((0, 4), 1))],
    Case("Softmax", [R(2, 3, 4)], {"axis": 1}, opset=11, torch=flattened, reference=by_torch(flattened),
         name="flattens"),
    *[Case("LayerNormalization", [R(*shape), R(*shape[axis:]), R(*shape[axis:])], {"axis": axis, "epsilon": 2.0**-10},
           tol=1e-4, torch=(norm := lambda x, s, b, n=shape[axis:]: F.layer_norm(x, n, s, b, 2.0**-10)),
           reference=by_torch(norm))
      for shape, axis in (((3, 5), 1), ((2, 3, 4), 2), ((2, 3, 4), 1), ((40, 33), 1))],
    Case("LayerNormalization", [R(4, 6), R(6)], tol=1e-4, torch=lambda x, s: F.layer_norm(x, (6,), s), name="no bias"),
    Case("Gather", [R(5, 3), V([[0, 4], [-1, 2]], np.int64)], torch=lambda x, i: x[i]),
    Case("Gather", [R(2, 5, 3), V([1, 1, 4], np.int32)], {"axis": 1}, torch=lambda x, i: x[:, i.long()],
         name="repeated"),
    Case("Gather", [R(5), V(3, np.int64)], torch=lambda x, i: x[i], name="scalar"),
    Case("Gather", [R(5, 3), V(np.zeros((0,)), np.int64)], torch=lambda x, i: x[i], name="no index"),
]


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


def cross_entropy(kind, reduction, ignore):
    def run(x, labels, weight=None):
        f = F.cross_entropy if kind == "SoftmaxCrossEntropyLoss" else F.nll_loss
        return f(x, labels.long(), weight, ignore_index=-100 if ignore is None else ignore, reduction=reduction)

    return run


LABELS = [2, 0, 4, 2, 1, 3]
for kind in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
    for mode in ("mean", "sum", "none"):
        for ignore in (None, 2):
            for weighted in (False, True):
                attrs = {"reduction": mode} | ({} if ignore is None else {"ignore_index": ignore})
                inputs = [R(6, 5), V(LABELS, np.int64)] + ([R(5, low=0.1)] if weighted else [])
                CASES.append(Case(kind, inputs, attrs, torch=cross_entropy(kind, mode, ignore), grad=[0],
                                  alloc=weighted, name=f"{mode}-{ignore}-{weighted}"))
    CASES.append(Case(kind, [R(2, 5, 3), V([LABELS[:3], LABELS[3:]], np.int32)], {},
                      torch=cross_entropy(kind, "mean", None),
                      grad=[0], name="spatial"))
    # Rows that start at any multiple of their elements' size, and have more classes than a block of threads.
    CASES.append(Case(kind, [R(5, 1301), V([1300, 0, 7, 650, 3], np.int64)], {"ignore_index": 3},
                      torch=cross_entropy(kind, "mean", 3), grad=[0], alloc=False, name="long"))


def of_run_time_inputs(case):
    """torch= of these cases takes the run-time inputs alone: shapes and axes stand in its text."""
    n = sum(not getattr(i, "const", False) for i in case.inputs)
    f = case.torch
    return dataclasses.replace(case, torch=f and (lambda *inputs: f(*inputs[:n])))


CASES = [of_run_time_inputs(case) for case in CASES]
HALVES = [dataclasses.replace(case, dtypes=(np.float16,), name=f"{case.name}-half") for case in CASES
          if case.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")]


@pytest.mark.parametrize("case", HALVES, ids=str)
def test_loss_of_halves(case):
    check_forward(case, np.float16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reduce(case):
    run_case(case)


@pytest.mark.parametrize("index", [5, -6])
def test_gather_out_of_range(index):
    expect_error(Case("Gather", [R(5, 3), V([0, index], np.int64)]), IndexError, f"index {index} at position 1")


@pytest.mark.parametrize("label", [5, -1])
def test_label_out_of_range(label):
    case = Case("SoftmaxCrossEntropyLoss", [R(2, 5), V([0, label], np.int64)])
    expect_error(case, IndexError, f"label {label} at position 1")


@pytest.mark.parametrize("dtype, ulp", [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=["f16", "bf16"])
def test_gradient_of_halves_is_rounded_once(dtype, ulp):
    """What is saved of the rows of 16-bit scores has more bits than they have."""
    torch.manual_seed(0)
    x, labels = torch.randn(4, 2500).mul(4).to(dtype), torch.tensor([0, 2499, 7, 1300])
    elem = {torch.float16: "float16", torch.bfloat16: "bfloat16"}[dtype]
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]>
        g ({elem}[4, 2500] x, int64[4] l) => ({elem} y) {{ y = SoftmaxCrossEntropyLoss <reduction = "sum"> (x, l) }}""")
    _, (dx, _) = call(_C.Session(model.SerializeToString()), [x, labels], b"\1\0", [torch.ones((), dtype=dtype)])
    wide = x.double().requires_grad_()
    F.cross_entropy(wide, labels, reduction="sum").backward()
    assert ((dx.double() - wide.grad).abs() <= 1.01 * ulp * wide.grad.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype, ulp", [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=["f16", "bf16"])
def test_statistics_of_halves_are_float32(dtype, ulp):
    """Far from zero, a mean in 16 bits would be wrong by a tenth of the deviation."""
    torch.manual_seed(0)
    x, w, b = torch.randn(6, 300).add(100).to(dtype), torch.randn(300).to(dtype), torch.randn(300).to(dtype)
    elem = {torch.float16: "float16", torch.bfloat16: "bfloat16"}[dtype]
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]>
        g ({elem}[6, 300] x, {elem}[300] w, {elem}[300] b) => ({elem}[6, 300] y) {{ y = LayerNormalization (x, w, b) }}""")
    dy = torch.randn(6, 300).to(dtype)
    _, grads = call(_C.Session(model.SerializeToString()), [x, w, b], b"\1\1\1", [dy])
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    F.layer_norm(leaves[0], (300,), *leaves[1:]).backward(dy.double())
    for got, leaf in zip(grads, leaves, strict=True):
        assert ((got.double() - leaf.grad).abs() <= 1.01 * ulp * leaf.grad.abs() + 2e-4).all()


@pytest.mark.parametrize("mode", ["mean", "sum", "none"])
def test_log_prob_is_differentiable(mode):
    """Both outputs of SoftmaxCrossEntropyLoss, the loss and the log probabilities, with gradients at once."""
    f = cross_entropy("SoftmaxCrossEntropyLoss", mode, None)
    run_case(Case("SoftmaxCrossEntropyLoss", [R(6, 5), V(LABELS, np.int64)], {"reduction": mode}, n_outputs=2, grad=[0],
                  torch=lambda x, labels: (f(x, labels), F.log_softmax(x, 1))))


def test_log_prob_alone():
    """The loss is not asked for; classes stand at dim 1 of three."""
    run_case(Case("SoftmaxCrossEntropyLoss", [R(2, 5, 3), V([LABELS[:3], LABELS[3:]], np.int64)], n_outputs=2, grad=[0],
                  no_grad_outputs=[0], torch=lambda x, labels: (F.cross_entropy(x, labels), F.log_softmax(x, 1))))
