"""Gradients of keys that heads share add up in order, and blocks that are hidden give the bias none."""

from __future__ import annotations

import pytest
import torch
from test_causal_mask import added, lower
from test_flash_native import SEED, TILES, agree, as_it_was, masked  # noqa: F401
from test_fuse_attention import Model, plain_attention, step


@pytest.mark.parametrize("threads", [1, 4])
def test_heads_that_share_keys_add_up(threads):
    torch.manual_seed(SEED)
    m = Model(torch.float32)
    q, k, v = m.random(2, 6, 140, 24), m.random(2, 2, 400, 24), m.random(2, 2, 400, 24)

    def repeated(x: str) -> str:
        wide = m("Expand", m("Unsqueeze", x, m.ints(2)), m.ints(2, 2, 3, 400, 24))
        return m("Reshape", wide, m.ints(2, 6, 400, 24))

    y = plain_attention(m, q, repeated(k), repeated(v), d=24, **masked(m, 140, 400, "causal 260"))
    agree(m, y, [], TILES, threads, "shared")


def test_hidden_blocks_give_the_bias_no_gradient():
    torch.manual_seed(SEED)
    m = Model(torch.float32)
    q, k, v = m.random(1, 2, 300, 16), m.random(1, 2, 900, 16), m.random(1, 2, 900, 16)
    bias = m.input(torch.randn(1, 2, 300, 900))
    s = m("Add", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), added(m, lower(m, 300, 900, 0), 300, 900))
    y = m("MatMul", m("Softmax", m("Add", s, bias), axis=-1), v)
    assert "causal = 1" in step(m.bytes(y), m.tensors, [1, 1, 1, 1])[2]
    agree(m, y, [], TILES, 2, "causal and bias")
