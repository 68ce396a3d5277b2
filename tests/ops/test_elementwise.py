"""Extremes, powers, remainders and conversions against torch, and how near every function comes to the exact value."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import OURS, C, Case, R, V, chain, expect_error, flat, run_case
from onnx import TensorProto
from test_elementwise_ops import BINARY, INF, NAN

from onnxtrain import _C

CASES = [
    Case("Min", [V([1.0, 2.0, NAN, 3.0]), V([1.0, 3.0, 1.0, NAN])], torch=torch.minimum, name="ties"),
    Case("Max", [V([1.0, 2.0, NAN, 3.0]), V([1.0, 3.0, 1.0, NAN])], torch=torch.maximum, name="ties"),
    Case("Pow", [R(3, 5, low=0.2, high=2), R(3, 5)], torch=torch.pow, fd=True),
    Case("Pow", [R(3, 5, low=0.2, high=2), R(5)], torch=torch.pow),
    *[Case("Pow", [R(3, 5, low=0.2, high=2), C(e, "float")], torch=torch.pow, name=f"constant-{e}")
      for e in (2.0, 3.0, 0.5, -1.0, 1.0, 0.0, 2.7)],
    Case("Pow", [R(3, 5, apart=0.2), C(2.0, "float")], torch=torch.pow, name="square-of-negative"),
    Case("Pow", [V([0.0, 0.0, 2.0]), V([0.0, 2.0, 3.0])], torch=torch.pow, name="zero-base"),
    Case("Pow", [V([0.0, 1.0, 2.0]), C(0.0, "float")], torch=torch.pow, name="zero-exponent"),
    Case("Pow", [R(3, 5, low=0.2, high=2), C(2)], torch=lambda x, e: torch.pow(x, e), name="int-exponent"),
    flat("Pow", V([2, -3, 5], np.int64), V([3, 2, 0], np.int64), name="ints"),
    Case("PRelu", [R(2, 3, 4, apart=0.05), R(3, 1)], torch=lambda x, s: torch.where(x > 0, x, x * s)),
    Case("Swish", [R(3, 5)], opset=24, torch=F.silu),
    flat("Mod", V([7, -7, 7, -7], np.int64), V([3, 3, -3, -3], np.int64)),
    flat("Mod", V([7, -7, 7, -7], np.int32), V([3, 3, -3, -3], np.int32), attrs={"fmod": 1}),
    Case("Mod", [R(3, 5, low=-9, high=9), R(5, low=1, high=2)], {"fmod": 1}, torch=torch.fmod),
    Case("Remainder", [R(3, 5, low=-9, high=9), R(5, apart=0.5)], domain=OURS, torch=torch.remainder),
    Case("Remainder", [V([4.0, -4.0, 4.0, -4.0, INF, -0.0, -6.0, 6.0]), V([INF, INF, -INF, -INF, 2.0, 2.0, 2.0, -2.0])],
         domain=OURS, torch=torch.remainder, name="ends"),
    Case("Pow", [C(2.0, "float"), R(3, 17, low=-9, high=9)], torch=torch.pow, name="of-two"),
    Case("Pow", [C([[[2.0]]], "float"), R(3, 17)], torch=torch.pow, name="of-two-wider"),
]
CASES += [Case(name, [R(3, 4), R(4), R(3, 1)][:n], torch=f) for n in (1, 2, 3) for name, f in {
    "Sum": lambda *x: sum(x), "Mean": lambda *x: sum(x) / len(x),
    "Max": lambda *x: torch.stack(torch.broadcast_tensors(*x)).amax(0),
    "Min": lambda *x: torch.stack(torch.broadcast_tensors(*x)).amin(0)}.items() if not (n == 2 and name in BINARY)]
CASES += [Case("Sum", [R(3, 4), R(3, 4), R(3, 4)], torch=lambda *x: sum(x), name="same-shape")]
CASES += [flat("IsInf", V([NAN, 1.0, INF, -INF]), attrs=a) for a in ({}, {"detect_negative": 0}, {"detect_positive": 0})]

# ---- conversion ----
TO = {"FLOAT": np.float32, "DOUBLE": np.float64, "INT64": np.int64, "INT32": np.int32, "BOOL": np.bool_,
      "UINT8": np.uint8, "INT8": np.int8, "INT16": np.int16, "FLOAT16": np.float16}
for source in (np.float32, np.float64, np.int64, np.int32, np.bool_, np.uint8, np.float16):
    contents = np.array([0, 1, 2, 100] if source is not np.bool_ else [False, True, True, False]).astype(source)
    CASES += [flat("Cast", V(contents, source), attrs={"to": getattr(TensorProto, name)}, alloc=False,
                   name=f"{source.__name__}-to-{name}") for name in TO]
CASES += [
    flat("Cast", V([-1.9, -0.5, 0.5, 1.9], np.float32), attrs={"to": TensorProto.INT64}, name="truncates"),
    flat("Cast", V([0.0, 0.1, -3.0, NAN], np.float32), attrs={"to": TensorProto.BOOL}, name="to-bool"),
    flat("Cast", V([2**24 + 1, 2**53 + 1, -(2**62) - 3], np.int64), attrs={"to": TensorProto.FLOAT},
         name="rounds-once"),
    Case("Cast", [R(3, 4)], {"to": TensorProto.DOUBLE}, torch=lambda x: x.double(), dtypes=(np.float32,)),
    Case("Cast", [R(3, 4)], {"to": TensorProto.FLOAT}, torch=lambda x: x,
         reference=lambda x: x.astype(np.float32), dtypes=(np.float32,), name="same"),
    Case("CastLike", [R(3, 4), V([1.0], np.float64)], torch=lambda x, y: x.double(), grad=[0], dtypes=(np.float32,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_elementwise(case):
    run_case(case)


ERRORS = [
    (flat("Cast", V([1.0]), attrs={"to": TensorProto.STRING}), (_C.UnsupportedError, TypeError), "Cast"),
]


@pytest.mark.parametrize("case, error, match", ERRORS, ids=[str(case) for case, _, _ in ERRORS])
def test_refuses(case, error, match):
    expect_error(case, error, match)


# operator, attributes, torch function, error of the value and of the slope over max(1, |value|) and max(1, |slope|)
CURVES = [
    ("Exp", {}, torch.exp, 2e-7, 2e-7), ("Tanh", {}, torch.tanh, 2e-7, 3e-7), ("Sigmoid", {}, torch.sigmoid, 2e-7, 2e-7),
    ("Erf", {}, torch.erf, 3e-7, 4e-7), ("Gelu", {}, F.gelu, 2e-7, 4e-7),
    ("Gelu", {"approximate": "tanh"}, lambda a: F.gelu(a, approximate="tanh"), 3e-7, 1e-6),
    ("Swish", {}, F.silu, 2e-7, 1e-6), ("Elu", {}, F.elu, 2e-7, 2e-7), ("Selu", {}, F.selu, 3e-7, 3e-7),
    ("Softplus", {}, F.softplus, 2e-7, 2e-7), ("Mish", {}, F.mish, 3e-7, 1e-6),
]


@pytest.mark.parametrize("op_type, attrs, function, bound, slope_bound", CURVES,
                         ids=[f"{name}{attrs or ''}" for name, attrs, *_ in CURVES])
def test_whole_curve(op_type, attrs, function, bound, slope_bound):
    """Value and slope beside float64's, where parts of a formula meet, in the tails, and what is not finite."""
    from harness import call, session_of
    x = torch.cat([torch.linspace(-110, 85, 40_001), torch.linspace(-7, 7, 100_001), torch.tensor([0.0, -0.0, 1e-30])])
    case = Case(op_type, [x.numpy()], attrs, opset=24)
    ends = torch.tensor([INF, -INF, NAN, 1e4, -1e4])
    (y,), (slope,) = call(session_of(case, [x.numpy()]), [x], b"\1", [torch.ones_like(x)])
    wide = x.double().requires_grad_()
    want = function(wide)
    want_slope, = torch.autograd.grad(want.sum(), wide)
    for got, expected, allowed in ((y, want.detach(), bound), (slope, want_slope, slope_bound)):
        assert ((got.double() - expected).abs() / expected.abs().clamp(min=1)).max() < allowed
    (got,), _ = call(session_of(case, [ends.numpy()]), [ends], b"\1", [torch.ones_like(ends)])
    assert torch.allclose(got.double(), function(ends.double()), equal_nan=True)


SPECIAL = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, -0.5, 2.0, 89.0, -89.0, 128.0, -150.0, 131072.0, -131072.0,
                        131073.0, 1e10, -3e38, 3.4e38, 1.5707964, 3.1415927, 1e-30, -1e-30, 0.41421357, 2.4142137])
ULPS = [("Sin", torch.sin, 1.1), ("Cos", torch.cos, 1.1), ("Tan", torch.tan, 2.5), ("Asin", torch.asin, 2),
        ("Acos", torch.acos, 1.5), ("Atan", torch.atan, 2.2), ("Tanh", torch.tanh, 2), ("Expm1", torch.expm1, 2),
        ("Log1p", torch.log1p, 2), ("Atanh", torch.atanh, 2.5), ("Lgamma", torch.lgamma, 1),
        ("Digamma", torch.digamma, 1), ("Erfinv", torch.erfinv, 3), ("Erfc", torch.erfc, 6)]
DOMAINS = dict.fromkeys(("Expm1", "Log1p", "Remainder", "Lgamma", "Digamma", "Erfinv", "Erfc"), OURS)


def numbers(n, seed=0):
    """Floats of every size, the special ones, and many about one; without those that are flushed to zero."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-2**31, 2**31, (n,), generator=generator).to(torch.int32).view(torch.float32)
    x = torch.cat([SPECIAL, bits, torch.randn(n, generator=generator) * 3, torch.linspace(-200, 200, n)])
    return x[(x.abs() >= 2e-38) | (x == 0) | x.isnan()]


def ulps(got, want):
    """The distance in units of float32's last digit; infinities, NaN and the signs of zeros are the same."""
    rounded = want.float()
    assert torch.equal(got.isnan(), rounded.isnan()) and torch.equal(got.isinf(), rounded.isinf())
    assert torch.equal(got.signbit() & ~got.isnan(), rounded.signbit() & ~got.isnan())
    want = want[rounded.abs() < INF]
    unit = (torch.frexp(want)[1].clamp(min=-125) - 24.0).double().exp2()
    flushed = (want.abs() < 2e-38) & (got[rounded.abs() < INF] == 0)
    return ((got[rounded.abs() < INF].double() - want).abs() / unit).masked_fill(flushed, 0).max().item()


@pytest.mark.parametrize("op_type, function, bound", ULPS, ids=[name for name, *_ in ULPS])
def test_every_float(op_type, function, bound):
    from harness import call, session_of
    x, domain = numbers(20_000), DOMAINS.get(op_type, "")
    (y,), _ = call(session_of(Case(op_type, [x.numpy()], domain=domain, opset=24), [x.numpy()]), [x], b"\0", None)
    assert ulps(y, function(x.double())) <= bound


@pytest.mark.parametrize("dtype, error", [(torch.float32, 6.1e-8), (torch.float64, 2e-14)], ids=str)
def test_slope_of_digamma(dtype, error):
    from harness import call, session_of
    steps = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    x = torch.cat([torch.logspace(-10, 10, 4000, dtype=torch.float64), steps - 1, steps - 2, steps - 30]).to(dtype)
    case = Case("Digamma", [x.numpy()], domain=OURS)
    _, (got,) = call(session_of(case, [x.numpy()]), [x], b"\1", [torch.ones_like(x)])
    wide = x.double()
    above = torch.special.zeta(torch.tensor(2.0).double(), torch.where(wide > 0, wide, 1 - wide))
    want = torch.where(wide > 0, above, (torch.pi / torch.sin(torch.pi * (wide - wide.round()))).square() - above)
    assert ((got.double() - want) / want).abs().max() < error


def test_every_direction():
    from harness import call, session_of
    y, x = numbers(20_000), numbers(20_000, 1)
    size = min(len(x), len(y))
    n = len(SPECIAL)
    y = torch.cat([y[:size], SPECIAL.repeat(n), torch.randn(5000)])
    x = torch.cat([x[:size], SPECIAL.repeat_interleave(n), torch.randn(5000)])
    case = Case("Atan2", [y.numpy(), x.numpy()], domain=OURS)
    (got,), _ = call(session_of(case, [y.numpy(), x.numpy()]), [y, x], b"\0\0", None)
    assert ulps(got, torch.atan2(y.double(), x.double())) <= 2.7


def test_every_power():
    """Of every two floats, and of those whose power is finite."""
    from harness import call, session_of
    x, y = numbers(20_000), numbers(20_000, 1)
    size = min(len(x), len(y))
    n = len(SPECIAL)
    near = torch.rand(20_000) * 4
    x = torch.cat([x[:size], SPECIAL.repeat(n), near, near - 2, near.exp()])
    y = torch.cat([y[:size], SPECIAL.repeat_interleave(n), torch.randn(20_000) * 20, torch.randint(-9, 9, (20_000,)).float(),
                   torch.full((20_000,), 2.5)])
    case = Case("Pow", [x.numpy(), y.numpy()], opset=24)
    (got,), _ = call(session_of(case, [x.numpy(), y.numpy()]), [x, y], b"\0\0", None)
    assert ulps(got, x.double().pow(y.double())) <= 1.6


def test_every_float_as_a_power_of_two():
    from harness import call, session_of
    x, two = numbers(20_000), C(2.0, "float")
    case = Case("Pow", [two, x.numpy()], opset=24)
    arrays = [np.float32(2), x.numpy()]
    (y,), _ = call(session_of(case, arrays), [x], b"\0", None)
    assert ulps(y, x.double().exp2()) <= 1


@pytest.mark.parametrize("op_type", ["Tanh", "Selu", "Elu", "Erf", "Sinh", "Asin", "Gelu", "Softsign", "Mish", "Log1p",
                                     "Expm1", "Erfinv"])
def test_sign_of_zero(op_type):
    from harness import call, session_of
    x = torch.tensor([0.0, -0.0] * 20)
    case = Case(op_type, [x.numpy()], domain=DOMAINS.get(op_type, ""), opset=24)
    (y,), _ = call(session_of(case, [x.numpy()]), [x], b"\0", None)
    assert torch.equal(y.signbit(), x.signbit()) and not y.any()


@pytest.mark.parametrize("op_type, alpha", [("Elu", {}), ("Selu", {})])
def test_exponential_units_near_zero(op_type, alpha):
    """exp(x) - 1 keeps its digits."""
    from harness import call, session_of
    x = -torch.logspace(-30, 1.5, 5000)
    (y,), _ = call(session_of(Case(op_type, [x.numpy()], opset=24), [x.numpy()]), [x], b"\0", None)
    want = {"Elu": F.elu, "Selu": F.selu}[op_type](x.double())
    assert ((y.double() - want) / want).abs().max() < 4e-7


@pytest.mark.parametrize("fmod", [1, 0, None])
def test_exact_remainders(fmod):
    """Of every two floats, small quotients and large ones, along rows and of one number; bit for bit."""
    from harness import call, session_of
    a, b = numbers(10_000), numbers(10_000, 1)
    size = min(len(a), len(b))
    a, b = a[:size], b[:size]
    b = torch.where(torch.arange(size) % 2 == 0, b, a * torch.randn(size).exp2())
    b = torch.where(b.abs() < 2e-38, 1.0, b)
    for x, y in ((a, b), (a, torch.tensor(0.3)), (a, torch.tensor(-7.0)), (torch.tensor(5e6), b)):
        case = Case("Mod", [x.numpy(), y.numpy()], {"fmod": fmod})
        if fmod is None:
            case = Case("Remainder", [x.numpy(), y.numpy()], domain=OURS)
        (got,), _ = call(session_of(case, [x.numpy(), y.numpy()]), [x, y], b"\0\0", None)
        want = torch.fmod(x.double(), y.double()).float()  # of float32 torch's is NaN where the quotient overflows
        kept = (want.abs() > 2e-38) | (want == 0)
        if not fmod:
            want = torch.where((want != 0) & (want.signbit() != y.signbit()), want + y, want)
        if fmod == 0:  # a zero has the sign of the divisor
            want = torch.where(want == 0, torch.zeros_like(want).copysign(y), want)
        kept &= (want.abs() > 2e-38) | (want == 0)  # others are flushed
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.view(torch.int32)[kept], want.view(torch.int32)[kept])


def test_vector_math_of_avx2():
    chosen = "every or slope_of_digamma or sign_of_zero or near_zero or exact_remainders"
    options = ["-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], env={**os.environ, "ONNXTRAIN_ISA": "avx2"},
                          capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stdout[-3000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_relu_hands_back_where_it_is_nan(dtype):
    """As torch's, alone and in a group."""
    from harness import call
    x = torch.tensor([-1, -0.0, 0, 2, NAN, INF, -INF] * 5, dtype=dtype)
    dy = torch.linspace(-1, 1, len(x)).to(dtype)
    for function, nodes in ((F.relu, [("Relu", {})]), (lambda a: F.relu(-a.tanh()), [("Tanh", {}), ("Neg", {}), ("Relu", {})])):
        leaf = x.clone().requires_grad_()
        want, = torch.autograd.grad(function(leaf), leaf, dy)
        _, (got,) = call(chain(x, *nodes), [x], b"\1", [dy])
        assert torch.allclose(got, want, rtol=1e-3 if dtype == torch.float16 else 1e-5, equal_nan=True), nodes


BIG = 300_001  # more than one thread's share, and a tail


@pytest.mark.parametrize("op_type", ["Relu", "Gelu", "Tanh", "Exp", "Sigmoid"])
def test_threads_agree(op_type):
    """Every split of a long tensor gives the same bits."""
    x = torch.randn(BIG)
    case = Case(op_type, [x.numpy()])
    from harness import call, session_of
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(call(session_of(case, [x.numpy()]), [x], b"\0", None)[0][0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("at", [0, 4095, 4096, 9999])
@pytest.mark.parametrize("op_type, dtype", [("Div", np.int64), ("Div", np.uint64), ("Div", np.int32), ("Div", np.int8), ("Mod", np.int64),
                                            ("Mod", np.int32)], ids=str)
def test_one_zero_among_divisors(op_type, dtype, at):
    divisors = np.ones(10000, dtype)
    divisors[at] = 0
    expect_error(Case(op_type, [R(10000, low=1, high=9, dtype=dtype), V(divisors, dtype)], opset=14), ValueError, "by zero")
