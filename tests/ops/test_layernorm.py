"""LayerNormalization over the last axes has torch's values and gradients, with statistics in float32."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, call, run_case
from test_reduce import by_torch

from onnxtrain import _C

CASES = [
    *[Case("LayerNormalization", [R(*shape), R(*shape[axis:]), R(*shape[axis:])], {"axis": axis, "epsilon": 2.0**-10},
           tol=1e-4, torch=(norm := lambda x, s, b, n=shape[axis:]: F.layer_norm(x, n, s, b, 2.0**-10)),
           reference=by_torch(norm))
      for shape, axis in (((3, 5), 1), ((2, 3, 4), 2), ((2, 3, 4), 1), ((40, 33), 1))],
    Case("LayerNormalization", [R(4, 6), R(6)], tol=1e-4, torch=lambda x, s: F.layer_norm(x, (6,), s), name="no bias"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reduce(case):
    run_case(case)


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
