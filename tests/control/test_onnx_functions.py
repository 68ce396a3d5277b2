"""Operators that the standard defines by a body: the body runs, and its gradient, where there is no descriptor."""

from __future__ import annotations

import onnx
import pytest
import torch
from common import model_of

from onnxtrain import _C, _onnx_functions


def without(monkeypatch, *names):
    """As if the core had no such operators of ai.onnx."""
    registry = dict(_onnx_functions._registry())
    for name in names:
        registry.pop(("", name), None)
    monkeypatch.setattr(_onnx_functions, "_registry", lambda: registry)


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_nothing_to_do_returns_the_model_itself():
    model = model_of("g (float[n] x) => (float[n] y) { y = Sin(x) }")
    assert _onnx_functions.inline(model) is model and not _onnx_functions.missing(model)


def test_what_has_no_body_stays_to_be_named():
    model = model_of("g (float[n] x) => (float[n] y) { y = local.Strange(x) }")
    model.opset_import.add(domain="local", version=1)
    assert _onnx_functions.inline(model) is model and _onnx_functions.missing(model) == {("local", "Strange")}
    with pytest.raises(_C.UnsupportedError, match=r"operator local\.Strange"):
        _C.Session(_onnx_functions.inline(model).SerializeToString())


CASES = [
    ("y = Celu<alpha = 1.5>(x)", "Celu", lambda x: torch.celu(x, 1.5)),
    ("y = Celu(x)", "Celu", torch.celu),
    ("y = Shrink<lambd = 0.4, bias = 0.1>(x)", "Shrink",
     lambda x: torch.where(x < -0.4, x + 0.1, torch.where(x > 0.4, x - 0.1, x * 0))),
    ("y = ThresholdedRelu<alpha = 0.3>(x)", "ThresholdedRelu", lambda x: torch.where(x > 0.3, x, x * 0)),
    ("y = Mish(x)", "Mish", torch.nn.functional.mish),
    ("y = Softsign(x)", "Softsign", torch.nn.functional.softsign),
    ("y = Gelu<approximate = \"tanh\">(x)", "Gelu", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ("y = LogSoftmax<axis = 0>(x)", "LogSoftmax", lambda x: torch.log_softmax(x, 0)),
]


@pytest.mark.parametrize("line,name,expected", CASES, ids=[c[0] for c in CASES])
def test_bodies_and_their_gradients(monkeypatch, line, name, expected):
    without(monkeypatch, name)
    kind = "float" if name == "Celu" else "double"  # the types that the operator has
    model = model_of(f"g ({kind}[3, 4] x) => ({kind}[3, 4] y) {{ {line} }}")
    before = model.SerializeToString()
    inlined = _onnx_functions.inline(model)
    assert model.SerializeToString() == before and inlined is not model and not _onnx_functions.missing(inlined)
    session = _C.Session(inlined.SerializeToString())
    dtype = torch.float32 if name == "Celu" else torch.float64
    x = randn(3, 4).to(dtype)
    tolerance = 1e-6  # bodies hold some constants in float32
    (y,), run = session.forward([x], b"\1")
    leaf = x.clone().requires_grad_()
    want = expected(leaf)
    assert torch.allclose(y, want, atol=tolerance)
    saved = [x for _ in run.saved_inputs] + [y for _ in run.saved_outputs]
    grad = randn(3, 4, seed=1).to(dtype)
    (got,) = run.backward(saved, [grad])
    assert torch.allclose(got, torch.autograd.grad(want, leaf, grad)[0], atol=tolerance)


def test_in_branches_and_in_functions(monkeypatch):
    """Bodies that depend on types, called in a subgraph and in a function of the model."""
    without(monkeypatch, "Gelu", "Mish")
    model = model_of("""g (double[n] x, bool c) => (double[n] y) {
        a = local.twice(x)
        y = If(c) <then_branch = yes () => (p) { p = Gelu(a) }, else_branch = no () => (p) { p = Mish(a) }>
    }
    <domain: "local", opset_import: ["" : 20]>
    twice (v) => (r) { g = Gelu(v)  r = Add(g, v) }""")
    model.opset_import.add(domain="local", version=1)
    session = _C.Session(_onnx_functions.inline(model).SerializeToString())
    gelu, mish = torch.nn.functional.gelu, torch.nn.functional.mish
    for c in (True, False):
        x = randn(5)
        (y,), _ = session.forward([x, torch.tensor(c)], bytes(2))
        a = gelu(x) + x
        assert torch.allclose(y, gelu(a) if c else mish(a), atol=1e-6)


def test_unknown_attribute_of_such_an_operator_is_refused(monkeypatch):
    without(monkeypatch, "Celu")
    model = model_of("g (float[n] x) => (float[n] y) { y = Celu<beta = 1.0>(x) }")
    with pytest.raises(_C.UnsupportedError, match="Celu.*attribute 'beta'"):
        _onnx_functions.inline(model)


def test_absent_inputs_reach_the_body():
    """CausalConvWithState leaves an input out in the middle; its body depends on types."""
    if not any(s.name == "CausalConvWithState" for s in onnx.defs.get_all_schemas()):
        pytest.skip("this onnx has no such operator")
    model = model_of("""g (float[2, 4, 8] x, float[4, 1, 4] w, float[2, 4, 3] past) => (float[2, 4, 8] y, float[2, 4, 3] present) {
        y, present = CausalConvWithState(x, w, "", past)
    }""", opset=27)
    session = _C.Session(_onnx_functions.inline(model).SerializeToString())
    x, w, past = (randn(*shape).float() for shape in ((2, 4, 8), (4, 1, 4), (2, 4, 3)))
    (y, present), _ = session.forward([x, w, past], bytes(3))
    all_ = torch.cat([past, x], -1)
    assert (torch.allclose(y, torch.nn.functional.conv1d(all_, w, groups=4), atol=1e-5)
            and torch.equal(present, all_[..., -3:]))
