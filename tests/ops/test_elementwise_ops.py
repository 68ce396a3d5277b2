"""Unary, binary and comparison operators have the values and gradients of torch, at their kinks and ends too."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import OURS, C, Case, R, V, expect_error, flat, run_case

from onnxtrain import _C

INTS = (np.int64, np.int32)
NAN, INF = float("nan"), float("inf")

# name, torch function, range of the input, distance kept from zero (kinks)
UNARY = [
    ("Neg", torch.neg, -2, 2, 0), ("Abs", torch.abs, -2, 2, 0.05), ("Sqrt", torch.sqrt, 0.1, 4, 0),
    ("Reciprocal", torch.reciprocal, -2, 2, 0.3), ("Exp", torch.exp, -3, 3, 0), ("Log", torch.log, 0.1, 5, 0),
    ("Erf", torch.erf, -4, 4, 0), ("Tanh", torch.tanh, -4, 4, 0), ("Sigmoid", torch.sigmoid, -6, 6, 0),
    ("Relu", torch.relu, -2, 2, 0.05), ("Softplus", F.softplus, -4, 4, 0), ("Softsign", F.softsign, -3, 3, 0.05),
    ("HardSwish", F.hardswish, -4, 4, 0), ("Mish", F.mish, -4, 4, 0), ("Sin", torch.sin, -3, 3, 0),
    ("Cos", torch.cos, -3, 3, 0), ("Tan", torch.tan, -1.2, 1.2, 0), ("Asin", torch.asin, -0.9, 0.9, 0),
    ("Acos", torch.acos, -0.9, 0.9, 0), ("Atan", torch.atan, -3, 3, 0), ("Sinh", torch.sinh, -2, 2, 0),
    ("Cosh", torch.cosh, -2, 2, 0), ("Asinh", torch.asinh, -3, 3, 0), ("Acosh", torch.acosh, 1.2, 4, 0),
    ("Atanh", torch.atanh, -0.9, 0.9, 0),
]
CASES = [Case(name, [R(3, 17, low=low, high=high, apart=apart)], torch=f, fd=True)
         for name, f, low, high, apart in UNARY]
CASES += [Case(name, [R(low=low, high=high, apart=apart)], torch=f) for name, f, low, high, apart in UNARY[:10]]
CASES += [Case(name, [R(2, 0, 3, low=low, high=high)], torch=f, alloc=False) for name, f, low, high, _ in UNARY[:10]]

# Attributes, and slopes exactly at the kink.
KINK = V([-1.5, -1.0, 0.0, 0.5, 1.0, 2.0])
CASES += [
    Case("Relu", [KINK], torch=torch.relu, name="kink"),
    Case("Abs", [KINK], torch=torch.abs, name="kink"),
    Case("LeakyRelu", [KINK], torch=F.leaky_relu),
    Case("LeakyRelu", [R(5, 7, apart=0.01)], {"alpha": 0.3}, torch=lambda x: F.leaky_relu(x, 0.3)),
    Case("Elu", [KINK], torch=F.elu),
    Case("Elu", [R(5, 7)], {"alpha": 0.5}, torch=lambda x: F.elu(x, 0.5)),
    Case("Elu", [KINK], {"alpha": 2.0}, torch=lambda x: F.elu(x, 2.0), name="kink-alpha"),
    Case("Selu", [R(5, 7)], torch=F.selu),
    Case("Selu", [KINK], torch=F.selu, name="kink"),
    Case("HardSigmoid", [R(5, 7, low=-4, high=4)], {"alpha": 0.25, "beta": 0.5},
         torch=lambda x: torch.clamp(0.25 * x + 0.5, 0, 1)),
    Case("HardSigmoid", [V([-3.0, 0.0, 1.0])], {"alpha": 0.5, "beta": 0.5}, name="strict", torch=lambda x: torch.where(
        (0.5 * x + 0.5 > 0) & (0.5 * x + 0.5 < 1), 0.5 * x + 0.5, (0.5 * x + 0.5).detach().clamp(0, 1))),
    # the bounds themselves: 3 / 6 + 1 / 2 is one, and flat
    Case("HardSigmoid", [V([-4.0, -3.0, -1.0, 0.0, 3.0, 4.0])], {"alpha": 1 / 6, "beta": 0.5},
         torch=lambda x: F.relu6(x + 3) / 6, name="kink"),
    Case("HardTanh", [V([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]), C(-1.0, "float"), C(1.0, "float")], domain=OURS,
         torch=lambda x, a, b: F.hardtanh(x), name="kink"),
    Case("HardSwish", [V([-3.5, -1.0, 0.0, 2.0, 3.5])], torch=F.hardswish),
    Case("Gelu", [R(5, 7, low=-5, high=5)], torch=F.gelu, fd=True),
    Case("Gelu", [R(5, 7, low=-5, high=5)], {"approximate": "tanh"}, torch=lambda x: F.gelu(x, approximate="tanh"),
         fd=True),
    Case("Gelu", [V([-1e4, -30.0, 0.0, 30.0, 1e4])], torch=F.gelu, name="tails"),
    Case("Softplus", [V([-800.0, -90.0, 0.0, 90.0, 800.0])], torch=F.softplus, name="tails"),
    Case("Sigmoid", [V([-800.0, -90.0, 0.0, 90.0, 800.0])], torch=torch.sigmoid, name="tails"),
    Case("Tanh", [V([-800.0, -9.0, 0.0, 1e-5, 9.0, 800.0])], torch=torch.tanh, name="tails"),
    Case("Mish", [V([-800.0, -30.0, 0.0, 30.0, 800.0])], torch=F.mish, name="tails"),
    flat("Exp", V([-INF, -200.0, 0.0, INF, NAN])),
    flat("Log", V([-1.0, 0.0, 1.0, INF, NAN])),
    flat("Erf", V([-INF, -10.0, 0.0, 10.0, INF, NAN])),
    flat("Tanh", V([-INF, INF, NAN])),
    flat("Sigmoid", V([-INF, INF, NAN])),
    flat("Relu", V([-INF, -0.0, INF, NAN])),
    *[flat(name, R(3, 5, low=-5, high=5)) for name in ("Floor", "Ceil", "Round", "Sign")],
    flat("Round", V([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]), name="half-to-even"),
    *[flat(name, R(3, 5, low=-9, high=9, dtype=t)) for name in ("Neg", "Abs", "Sign") for t in INTS],
]

# ---- two operands ----
SHAPES = [((3, 4), (3, 4)), ((), ()), ((3, 4), ()), ((), (2, 3)), ((2, 3, 5), (5,)), ((4,), (2, 3, 4)),
          ((3, 1), (1, 4)), ((2, 3, 5), (2, 3, 1)), ((2, 1, 5), (3, 1)), ((2, 3, 5), (1, 3, 1)), ((2, 0, 3), (1, 3)),
          ((1,), (1, 1, 1))]
BINARY = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Min": torch.minimum,
          "Max": torch.maximum}
CASES += [Case(name, [R(*a), R(*b, apart=0.3)], torch=f, alloc=name in ("Mul", "Max"))
          for name, f in BINARY.items() for a, b in SHAPES]
CASES += [flat(name, R(2, 5, low=-9, high=9, dtype=t), R(5, low=1, high=9, dtype=t)) for name in BINARY for t in INTS
          if name != "Div"]
CASES += [
    *[flat("Div", V([7, -7, 7, -7, np.iinfo(t).min], t), V([2, 2, -2, -2, -1], t), name=f"truncates-{t.__name__}",
           reference=lambda a, b, t=t: np.array([3, -3, -3, 3, np.iinfo(t).min], t)) for t in INTS],
    Case("Atan2", [R(3, 5, apart=0.1), R(5, apart=0.1)], domain=OURS, torch=torch.atan2, fd=True),
    Case("Atan2", [V([0.0, -0.0, 1.0, -1.0, 1e20, 2.0]), V([0.0, -0.0, 0.0, -0.0, 1e20, -2.0])], domain=OURS,
         torch=torch.atan2, name="ends"),
    Case("Log1p", [R(3, 17, low=-0.9, high=5)], domain=OURS, torch=torch.log1p, fd=True),
    Case("Log1p", [V([-2.0, -1.0, -0.0, 1e-20, 1e30, INF, NAN])], domain=OURS, torch=torch.log1p, name="ends"),
    Case("Expm1", [R(3, 17)], domain=OURS, torch=torch.expm1, fd=True),
    Case("Expm1", [V([-INF, -200.0, -0.0, 1e-20, 80.0, INF, NAN])], domain=OURS, torch=torch.expm1, name="ends"),
    Case("Lgamma", [R(3, 17, low=0.2, high=5)], domain=OURS, torch=torch.lgamma, fd=True),
    Case("Lgamma", [V([-2.5, -0.5, 0.3, 0.9999, 1.0, 1.0001, 2.0, 2.0001, 6.9, 7.1, 1e20])], domain=OURS,
         torch=torch.lgamma, name="both-sides"),
    flat("Lgamma", V([-INF, -2.0, 0.0, 1e30, INF, NAN]), domain=OURS, torch=torch.lgamma, name="ends"),
    # torch's own slope of float64 is 5e-10 off; ours is tested below
    Case("Digamma", [R(3, 17, low=0.2, high=5)], domain=OURS, torch=torch.digamma, fd=True, tol64=1e-9),
    Case("Digamma", [V([-2.5, -0.6, 0.3, 7.9, 8.1, 1e20])], domain=OURS, torch=torch.digamma, tol64=1e-9,
         name="both-sides"),
    flat("Digamma", V([-INF, -2.0, -0.0, 0.0, 1e30, INF, NAN]), domain=OURS, torch=torch.digamma, name="ends"),
    Case("Trigamma", [R(3, 17, low=0.2, high=5)], domain=OURS, torch=lambda x: torch.polygamma(1, x), grad=False,
         tol64=1e-9),
    Case("Erfc", [R(3, 17)], domain=OURS, torch=torch.erfc, fd=True),
    Case("Erfc", [V([-INF, -9.0, -0.0, 1e-20, 1.0, 4.0, 9.0, 11.0, INF, NAN])], domain=OURS, torch=torch.erfc,
         name="ends"),
    Case("Erfinv", [R(3, 17, low=-0.9, high=0.9)], domain=OURS, torch=torch.erfinv, fd=True),
    Case("Erfinv", [V([-2.0, -1.0, -0.0, 1e-20, 0.85, 0.99999, 1.0, 2.0, NAN])], domain=OURS, torch=torch.erfinv,
         name="ends"),
    Case("Logit", [R(3, 17, low=0.1, high=0.9)], domain=OURS, torch=torch.logit, fd=True),
    Case("Logit", [V([0.0, 1e-20, 0.5, 1.0, 2.0, NAN])], domain=OURS, torch=torch.logit, name="ends"),
]

# ---- comparison, logic ----
PAIR = (V([1, 2, 3, 4], np.int64), V([2, 2, 2, 4], np.int64))
for op in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"):
    CASES += [flat(op, R(3, 4), R(4)), flat(op, V([NAN, 1.0, 2.0]), V([NAN, 1.0, 1.0]), name="nan"), flat(op, *PAIR),
              flat(op, V([1, 2], np.int32), V(2, np.int32), name="scalar")]
CASES += [flat("Equal", V([True, False], bool), V([True, True], bool))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_elementwise(case):
    run_case(case)


ERRORS = [
    (flat("Add", V([1.0, 2.0]), V([1.0, 2.0, 3.0])), ValueError, "broadcast"),
    (flat("Add", V([1.0], np.float32), V([1], np.int64), name="mixed"), TypeError, "int64"),
    (flat("Div", V([1, 2], np.int64), V([1, 0], np.int64), name="zero"), ValueError, "zero"),
    (flat("Div", V([1, 2], np.int32), V([1, 0], np.int32), name="zero"), ValueError, "zero"),
    (flat("Gelu", V([1.0]), attrs={"approximate": "cubic"}), (ValueError, _C.UnsupportedError), "approximate"),
]


@pytest.mark.parametrize("case, error, match", ERRORS, ids=[str(case) for case, _, _ in ERRORS])
def test_refuses(case, error, match):
    expect_error(case, error, match)
