"""RMSNormalization as models write it: the pass on the CPU, where it runs only when asked for."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest
import torch

from onnxtrain import _C

HEADER = '<ir_version: 10, opset_import: ["" : 23]> '
CONSTANTS = """two = Constant <value = float {2}> ()  e = Constant <value = float {1e-5}> ()
    last = Constant <value = int64[1] {AXIS}> () """
FORMS = {
    "pow, reciprocal": "p = Pow(x, two)  m = ReduceMean(p, last)  t = Add(m, e)  q = Sqrt(t)  i = Reciprocal(q)"
                       "  u = Mul(x, i)  y = Mul(w, u)",
    "product, division": "p = Mul(x, x)  m = ReduceMean(p, last)  t = Add(e, m)  q = Sqrt(t)  u = Div(x, q)"
                         "  y = Mul(u, w)",
    "swapped": "p = Mul(x, x)  m = ReduceMean(p, last)  t = Add(e, m)  q = Sqrt(t)  i = Reciprocal(q)"
               "  u = Mul(i, x)  y = Mul(u, w)",
    "operator": "y = RMSNormalization <epsilon = 1e-5> (x, w)",
}
OTHERS = {
    "cube": FORMS["pow, reciprocal"].replace("Pow(x, two)", "Pow(x, three)"),
    "of another": FORMS["swapped"].replace("Mul(i, x)", "Mul(i, p)"),
    "not inverted": FORMS["swapped"].replace("i = Reciprocal(q)", "i = Tanh(q)"),
    "no keepdims": FORMS["product, division"].replace("ReduceMean(", "ReduceMean <keepdims = 0> ("),
    "sum": FORMS["product, division"].replace("ReduceMean(", "ReduceSum("),
}


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    yield
    _C.disable_passes([])


def step(body: str, tensors: list[torch.Tensor], dtype: str, fuse: bool,
         axis: int = -1) -> tuple[list[torch.Tensor], str]:
    _C.disable_passes(["+fuse_rms_norm"] if fuse else [])
    shape, row = (str(list(t.shape)) for t in tensors)
    constants = CONSTANTS.replace("AXIS", str(axis)) + "three = Constant <value = float {3}> () "
    text = f"g (float{shape} x, float{row} w) => (float{shape} y) {{ {constants} {body} }}".replace("float", dtype)
    session = _C.Session(onnx.parser.parse_model(HEADER + text).SerializeToString())
    (y,), run = session.forward(tensors, b"\1\1")
    torch.manual_seed(5)
    grads = run.backward([tensors[i] for i in run.saved_inputs] + [y][:len(run.saved_outputs)],
                         [torch.randn(y.shape, dtype=torch.float64).to(y.dtype)])
    return [y, *grads], session.text("program")


@pytest.mark.parametrize("dtype, tol", [("float", 2e-5), ("double", 1e-12)])
@pytest.mark.parametrize("form", FORMS)
def test_as_apart(form, dtype, tol):
    torch.manual_seed(0)
    tensors = [torch.randn(s, dtype=torch.float64).to(torch.float32 if dtype == "float" else torch.float64)
               for s in ((3, 6, 24), (24,))]
    got, program = step(FORMS[form], tensors, dtype, True)
    assert "FusedNorm <" in program and "FusedNormGrad <" in program and "rms = 1" in program, program
    assert not any(op in program for op in ("Sqrt", "Pow", "ReduceMean", "Reciprocal", "Div")), program
    want, apart = step(FORMS[form], tensors, dtype, False)
    assert "FusedNorm" not in apart
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)
    if form == "operator" and dtype == "float":
        torch.testing.assert_close(got[0], torch.nn.functional.rms_norm(tensors[0], (24,), tensors[1], 1e-5))


@pytest.mark.parametrize("form", OTHERS)
def test_what_only_looks_like_it(form):
    x = torch.rand(6, 6) + 0.5
    got, program = step(OTHERS[form], [x, torch.rand(6)], "float", True)
    assert "FusedNorm" not in program, program
    for a, b in zip(got, step(OTHERS[form], [x, torch.rand(6)], "float", False)[0], strict=True):
        assert a.shape == b.shape


def test_another_axis():
    _, program = step(FORMS["swapped"], [torch.rand(6, 6), torch.rand(6)], "float", True, axis=0)
    assert "FusedNorm" not in program, program


def test_a_scale_of_more_than_a_row():
    _, program = step(FORMS["swapped"], [torch.rand(6, 6), torch.rand(6, 6)], "float", True)
    assert "FusedNorm" not in program, program
