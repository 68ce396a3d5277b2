"""Attention moves the transposes of its linear layers where they cost nothing, and leaves those of others."""

from __future__ import annotations

import pytest
from test_fuse_attention import Model, as_it_was, compare, plain_attention, rough  # noqa: F401


@pytest.mark.parametrize("last", ["gemm", "matmul", "no bias"])
@pytest.mark.parametrize("packed_weights", [True, False])
def test_batch_first_costs_no_transpose(last, packed_weights):
    """nn.MultiheadAttention's way to its own order and back, around its first layers and its last."""
    B, S, H, D = 2, 5, 3, 4
    m = Model()
    x = m("Transpose", m.random(B, S, 7), perm=[1, 0, 2])
    if packed_weights:
        linear = m("Add", m("MatMul", x, m.random(7, 3 * H * D)), m.random(3 * H * D))
        parts = m("Split", linear, n=3, axis=2, num_outputs=3)
    else:
        parts = [m("Add", m.random(H * D), m("MatMul", x, m("Transpose", m.random(H * D, 7), perm=[1, 0])))
                 for _ in range(3)]
    q, k, v = (m("Transpose", m("Reshape", t, m.ints(S, B * H, D)), perm=[1, 0, 2]) for t in parts)
    q, k, v = (m("Reshape", t, m.ints(B, H, S, D)) for t in (q, k, v))
    y = m("Transpose", plain_attention(m, q, k, v, mask=m.input(rough((B, 1, 1, S))), drop=0.2), perm=[2, 0, 1, 3])
    if last == "gemm":
        y = m("Gemm", m("Reshape", y, m.ints(S * B, H * D)), m.random(6, H * D), m.random(6), transB=1)
    else:
        y = m("MatMul", m("Reshape", y, m.ints(S, B, H * D)), m.random(H * D, 6))
        y = m("Add", y, m.random(6)) if last == "matmul" else y
    y = m("Transpose", m("Reshape", y, m.ints(S, B, 6)), perm=[1, 0, 2])
    text = compare(m, y, every_subset=packed_weights and last == "gemm", inner=4 if packed_weights else 8)
    assert "Transpose" not in text


@pytest.mark.parametrize("where", ["front", "behind"])
def test_linear_layers_elsewhere_keep_their_transpose(where):
    m = Model()
    q, k, v = m.random(2, 3, 5, 4), m.random(2, 3, 7, 4), m.random(2, 3, 7, 4)
    y = m("Reshape", m("Transpose", plain_attention(m, q, k, v), perm=[0, 2, 1, 3]), m.ints(2, 5, 12))
    if where == "front":  # of a layer that is also read elsewhere
        x = m("MatMul", m("Transpose", m.random(5, 2, 6), perm=[1, 0, 2]), m.random(6, 12))
        z = m("MatMul", m("Reshape", x, m.ints(2, 5, 12)), m("Transpose", y, perm=[0, 2, 1]))
        text = compare(m, z, m("Tanh", x), every_subset=False)
    else:  # what is between is no linear layer
        z = m("Softplus", m("MatMul", y, m.random(12, 6)))
        text = compare(m, m("Transpose", z, perm=[1, 0, 2]), every_subset=False)
    assert "perm = [1, 0, 2]" in text.split("# backward")[0]
