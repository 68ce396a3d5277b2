"""Both kernels of Rotate, in place or not, compute the formula of rotary embeddings."""

from __future__ import annotations

import torch
from test_fuse_attention import Model, as_it_was, step  # noqa: F401
from test_fuse_rotary import SEED, rotary

from onnxtrain import _C


def test_kernels_agree_and_take_what_they_read():
    """Both kernels, in place or not, against the formula in float64."""
    torch.manual_seed(SEED)
    for kernel in ([], ["rotate_simd"]):
        _C.disable_kernels(kernel)
        for dtype, tol in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
            m = Model(dtype)
            x, cos, sin = m.random(3, 50, 70), m.random(50, 70), m.random(70)
            y, grads, text = step(m.bytes(rotary(m, m("Exp", x), cos, sin, 70)), m.tensors, [True, False, False])
            leaf, c, s = (t.double() for t in m.tensors)
            leaf.requires_grad_()
            a, b = leaf.exp().chunk(2, -1)
            want = leaf.exp() * c + torch.cat((-b, a), -1) * s
            torch.manual_seed(5)
            want.backward(torch.randn(want.shape, dtype=torch.float64).to(dtype).double())
            torch.testing.assert_close(y[0].double(), want.detach(), rtol=tol, atol=tol * 20)
            torch.testing.assert_close(grads[0].double(), leaf.grad, rtol=tol, atol=tol * 20)
            assert "Rotate" in text
