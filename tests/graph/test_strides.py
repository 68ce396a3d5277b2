"""Attention reads parts of one product, and tensors under another order, through their strides."""

from __future__ import annotations

import pytest
import torch
from test_fuse_attention import Model, as_it_was, compare, plain_attention, rough  # noqa: F401


def packed(m: Model, B: int, S: int, H: int, D: int, how: str) -> tuple[str, str, str]:
    """Q, K and V out of one tensor, in the ways of the exporters."""
    x = m.random(B, S, 3 * H * D)
    if how == "split":
        return tuple(m.heads(t, B, S, H, D) for t in m("Split", x, n=3, axis=2, num_outputs=3))
    if how == "slice":
        parts = [m("Slice", x, m.ints(i * H * D), m.ints((i + 1) * H * D), m.ints(2)) for i in range(3)]
        return tuple(m.heads(t, B, S, H, D) for t in parts)
    x = m("Reshape", x, m.ints(B, S, 3, H, D))
    if how == "gather first":
        parts = [m("Gather", x, m.constant(i, torch.int64), axis=2) for i in (0, 1, -1)]
        return tuple(m("Transpose", t, perm=[0, 2, 1, 3]) for t in parts)
    x = m("Transpose", x, perm=[2, 0, 3, 1, 4])
    if how == "unbind":
        return tuple(m("Squeeze", t, m.ints(0)) for t in m("Split", x, n=3, axis=0, num_outputs=3))
    return tuple(m("Gather", x, m.constant(i, torch.int64), axis=0) for i in range(3))


@pytest.mark.parametrize("how", ["split", "slice", "gather first", "gather", "unbind"])
@pytest.mark.parametrize("bias", [False, True])
def test_one_product_of_three_projections_is_not_split(how, bias):
    m = Model()
    q, k, v = packed(m, 2, 5, 3, 4, how)
    y = plain_attention(m, q, k, v, mask=m.random(3, 1, 5) if bias else None)
    y = m("Reshape", m("Transpose", y, perm=[0, 2, 1, 3]), m.ints(2, 5, 12))
    text = compare(m, y)
    for op in ("Transpose", "Split", "Slice", "Gather ", "Concat", "GatherGrad"):
        assert op not in text
    assert bias or "targets = [0, 0, 0, -1]" in text


def test_keys_and_values_of_one_product():
    m = Model()
    q, x = m.random(2, 5, 12), m.random(2, 7, 24)
    k, v = m("Split", x, n=2, axis=2, num_outputs=2)
    y = plain_attention(m, m.heads(q, 2, 5, 3, 4), m.heads(k, 2, 7, 3, 4), m.heads(v, 2, 7, 3, 4))
    assert "targets = [0, 1, 1, -1]" in compare(m, m("Transpose", y, perm=[0, 2, 1, 3])).replace("targets = [-1", "")


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_one_batch_dim_as_multihead_attention_has_it(drop):
    """[L, B H, D] transposed, the scores seen as [B, H, S, T] for the padding and as [B H, S, T] by the products."""
    B, H, S, D = 2, 3, 5, 4
    m = Model()
    x, mask = m.random(S, B, 3 * H * D), rough((B, 1, 1, S))
    q, k, v = (m("Transpose", m("Reshape", t, m.ints(S, B * H, D)), perm=[1, 0, 2])
               for t in m("Split", x, n=3, axis=2, num_outputs=3))
    s = m("MatMul", m("Mul", q, m.constant(0.5)), m("Transpose", k, perm=[0, 2, 1]))
    s = m("Reshape", m("Add", m("Reshape", s, m.ints(B, H, S, S)), m.input(mask)), m.ints(B * H, S, S))
    p = m("Softmax", s, axis=2)
    if drop:
        p = m("Dropout", p, m.constant(drop, torch.float32), m.constant(True, torch.bool))
    y = m("Reshape", m("Transpose", m("MatMul", p, v), perm=[1, 0, 2]), m.ints(S, B, H * D))
    text = compare(m, y)
    assert "Transpose" not in text and "batch_dims = [2, 3]" in text
