"""The plain kernels of FusedNorm and its gradient, which devices' are held against: passes create them on the CPU only
when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import _C

HEADER = '<ir_version: 10, opset_import: ["" : 23]> '
LAYER = "y = LayerNormalization <epsilon = 0.01> (x, w, b)"
RMS = "y = RMSNormalization <epsilon = 0.01> (x, w)"


@pytest.fixture(autouse=True)
def asked() -> Iterator[None]:
    _C.disable_passes(["+fuse_norm", "+fuse_rms_norm"])
    yield
    _C.disable_passes([])


def session_of(body: str, rows: int, outputs: str = "double[r, 7] y") -> _C.Session:
    text = f"g (double[r, 7] x, double[7] w, double[7] b) => ({outputs}) {{ {body} }}".replace("[r", f"[{rows}")
    return _C.Session(onnx.parser.parse_model(HEADER + text).SerializeToString())


@pytest.mark.parametrize("body", [LAYER, RMS], ids=["layer", "rms"])
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_as_torch(body, rows):
    torch.manual_seed(0)
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((rows, 7), (7,), (7,))]
    session = session_of(body, rows)
    (y,), run = session.forward(tensors, b"\1\1\1")
    dy = torch.randn(rows, 7, dtype=torch.float64)
    saved = [tensors[i] for i in run.saved_inputs] + [[y][i] for i in run.saved_outputs]
    grads = run.backward(saved, [dy])
    assert "FusedNormGrad" in session.text("program") or not rows
    x, w, b = (t.clone().requires_grad_() for t in tensors)
    want = F.layer_norm(x, (7,), w, b, 0.01) if body == LAYER else F.rms_norm(x, (7,), w, 0.01)
    want.backward(dy)
    torch.testing.assert_close(y, want.detach(), rtol=1e-12, atol=1e-12)
    for got, leaf in zip(grads, (x, w, b), strict=True):
        if got is not None and leaf.grad is not None:
            torch.testing.assert_close(got, leaf.grad, rtol=1e-12, atol=1e-12)
    assert grads[0] is not None and grads[1] is not None and (grads[2] is None or body == LAYER)


def test_statistics_of_layer_normalization():
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((5, 7), (7,), (7,)))
    session = session_of(LAYER.replace("y =", "y, mean, inv ="), 5,
                         "double[r, 7] y, double[r, 1] mean, double[r, 1] inv")
    (_, mean, inv), _ = session.forward([x, w, b], bytes(3))
    assert "FusedNorm" in session.text("program")
    torch.testing.assert_close(mean, x.mean(-1, keepdim=True), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inv, (x.var(-1, keepdim=True, unbiased=False) + 0.01).rsqrt(), rtol=1e-12, atol=1e-12)
