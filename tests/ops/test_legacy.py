"""Operators of opsets 1 to 6: converted up, with their gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, call, expect_error, run_case, session_of

from onnxtrain import _C

X = R(2, 3, 4, low=0.2, high=1.5)
CONSUMED = {"consumed_inputs": [0]}


def old(op_type, inputs, attrs=None, opset=1, **more):
    """The reference evaluator knows no opset before 7 of most operators: torch is the reference."""
    torch_ = more["torch"]
    more.setdefault("alloc", False)
    more.setdefault("kernels", False)  # those of the operators of today
    return Case(op_type, inputs, attrs or {}, opset=opset, name=more.pop("name", f"v{opset} {attrs or ''}"),
                reference=lambda *a: [t.numpy() for t in _tuple(torch_(*[torch.from_numpy(np.array(v)) for v in a]))],
                **more)


def _tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


UNARY = {
    "Abs": torch.abs, "Exp": torch.exp, "Log": torch.log, "Neg": torch.neg, "Reciprocal": torch.reciprocal,
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Sqrt": torch.sqrt, "Tanh": torch.tanh, "Elu": F.elu,
    "LeakyRelu": F.leaky_relu, "HardSigmoid": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
}
BINARY = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Pow": torch.pow}
LOGIC = {"And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "Equal": torch.eq,
         "Greater": torch.gt, "Less": torch.lt}


def logic_inputs(name, *shape):
    kind = {"Greater": np.float32, "Less": np.float32, "Equal": np.int64}.get(name, np.bool_)
    return R(*shape, low=0, high=3, dtype=kind)


CASES = [
    *[old(name, [X], CONSUMED, torch=fn) for name, fn in UNARY.items()],
    old("Ceil", [X], CONSUMED, grad=False, torch=torch.ceil),
    old("Floor", [X], CONSUMED, grad=False, torch=torch.floor),
    old("Clip", [X], {"min": 0.4, "max": 1.1, **CONSUMED}, torch=lambda x: x.clamp(0.4, 1.1)),
    old("Selu", [R(3, 4)], CONSUMED, torch=lambda x: 1.0507 * torch.where(x > 0, x, 1.6732 * (x.exp() - 1)),
        tol64=1e-6),
    *[old(name, [X, X], torch=fn) for name, fn in BINARY.items()],
    *[old(name, [X, R(3, low=0.5, high=1.5)], {"broadcast": 1, "axis": 1}, torch=lambda x, y, fn=fn: fn(x, y[:, None]))
      for name, fn in BINARY.items()],
    old("Add", [X, R(2, 3)], {"broadcast": 1, "axis": 0, **CONSUMED}, torch=lambda x, y: x + y[:, :, None]),
    old("Mul", [X, R(3, 4)], {"broadcast": 1}, opset=6, torch=torch.mul),
    old("Mul", [X, R(3)], {"broadcast": 1, "axis": -2}, opset=6, torch=lambda x, y: x * y[:, None]),
    old("Sub", [X, R(1)], {"broadcast": 1, "axis": 0}, opset=6, torch=torch.sub),
    *[old(name, [logic_inputs(name, 2, 3, 4), logic_inputs(name, 3)], {"broadcast": 1, "axis": 1}, grad=False,
          torch=lambda x, y, fn=fn: fn(x, y[:, None])) for name, fn in LOGIC.items()],
    old("Sum", [X, X, X], torch=lambda a, b, c: a + b + c, opset=6),
    old("Mean", [X, X], CONSUMED, torch=lambda a, b: (a + b) / 2),
    old("Max", [R(2, 3), R(2, 3)], opset=6, torch=torch.maximum),
    old("Min", [R(2, 3), R(2, 3)], opset=6, torch=torch.minimum),
    old("PRelu", [R(2, 3, 4, apart=0.1), R(3)], opset=6, torch=lambda x, s: torch.where(x < 0, x * s[:, None], x)),
    old("PRelu", [R(2, 3, apart=0.1), R(1)], CONSUMED, torch=lambda x, s: torch.where(x < 0, x * s, x)),
    old("Gemm", [R(2, 3), R(4, 3), R(4)], {"broadcast": 1, "transB": 1, "beta": 0.5}, opset=6,
        torch=lambda a, b, c: a @ b.T + c / 2),
    old("Gemm", [R(2, 3), R(3, 4), R(2, 4)], torch=lambda a, b, c: a @ b + c),
    old("Cast", [X], {"to": "INT64"}, grad=False, torch=lambda x: x.long()),
    old("Cast", [R(3, dtype=np.int64)], {"to": "DOUBLE"}, grad=False, torch=lambda x: x.double()),
    old("Concat", [R(2, 3), R(2, 1)], torch=lambda a, b: torch.cat([a, b], 1)),
    old("Concat", [R(2, 3), R(1, 3)], {"axis": 0}, torch=lambda a, b: torch.cat([a, b])),
    old("Split", [R(5, 2)], {"axis": 0, "split": [2, 3]}, n_outputs=2, torch=lambda x: x.split([2, 3])),
    old("Split", [R(4, 2)], n_outputs=2, torch=lambda x: x.split(2)),
    old("Tile", [X, C([2.0], np.float32), C([1.0], np.float32)], torch=lambda x, n, a: x.repeat(1, 2, 1)),
    old("Dropout", [X], {"is_test": 1, "ratio": 0.7}, opset=6, torch=lambda x: x * 1),
    *[old("BatchNormalization", [R(4, 3, 2), R(3), R(3), R(3), R(3, low=0.5, high=2)], attrs, opset=opset,
          grad=[0, 1, 2], torch=lambda x, s, b, m, v: F.batch_norm(x, m, v, s, b, False, 0.1, 1e-5), tol64=1e-9)
      for attrs, opset in (({"is_test": 1, "spatial": 1}, 6), ({"is_test": 1, **CONSUMED}, 1), ({"spatial": 1}, 7))],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_legacy(case):
    run_case(case)


def test_dropout_drops():
    case = Case("Dropout", [R(2000)], {"ratio": 0.25}, opset=6)
    x = torch.ones(2000)
    session = session_of(case, [x.numpy()])
    assert session.random
    (y,), (grad,) = call(session, [x], b"\1", [torch.ones(2000)], seed=3)
    assert 0.2 < float((y == 0).double().mean()) < 0.3 and torch.allclose(y[y != 0], torch.tensor(1 / 0.75))
    assert torch.equal(grad, y)


def test_recurrent_networks_have_output_sequence():
    rng = np.random.default_rng(0)
    x, w, r = (rng.uniform(-1, 1, s).astype(np.float32) for s in ((5, 2, 3), (1, 16, 3), (1, 16, 4)))
    results = []
    for opset, attrs in ((1, {"output_sequence": 1}), (7, {})):
        case = Case("LSTM", [x, w, r], {"hidden_size": 4, **attrs}, n_outputs=2, opset=opset)
        results.append(call(session_of(case, [x, w, r]), [torch.from_numpy(v) for v in (x, w, r)], bytes(3), None)[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


ERRORS = [
    (Case("Add", [X, R(4)], opset=6), ValueError, "broadcast is 0"),
    (Case("Add", [X, R(4)], {"broadcast": 1, "axis": 3}, opset=6), ValueError, "axis 3"),
    (Case("Add", [R(4), X], {"broadcast": 1}, opset=6), ValueError, "first operand would be broadcast"),
    (Case("Cast", [X], {"to": "NUMBER"}, opset=1), ValueError, "attribute to is 'NUMBER'"),
    (Case("Dropout", [X], n_outputs=2, opset=6), _C.UnsupportedError, "output mask of opset"),
    (Case("Relu", [X], {"alpha": 1.0}, opset=1), _C.UnsupportedError, "alpha"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
