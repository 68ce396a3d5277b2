"""The node of attention and its gradient agree with the nodes apart in blocks, with dropout and on many threads."""

from __future__ import annotations

import math

import pytest
import torch
from test_fuse_attention import (  # noqa: F401
    SEED,
    TILES,
    Model,
    as_it_was,
    compare,
    heads_model,
    plain_attention,
    rough,
    step,
)

from onnxtrain import _C


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("columns", [7, 64, 300])
def test_dropout_drops_what_it_did(dtype, ratio, columns):
    m, y = heads_model(dtype, T=columns, drop=ratio, mask=rough((5, columns)))
    compare(m, y, tol=1e-10 if dtype == torch.float64 else 2e-5, every_subset=columns == 7)


def test_dropout_follows_the_seed():
    m, y = heads_model(drop=0.5)
    data = m.bytes(y)
    first, second, again = (step(data, m.tensors, [0, 0, 0], seed)[0][0] for seed in (1, 2, 1))
    assert torch.equal(first, again) and not torch.allclose(first, second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", [(129, 257), (1, 513), (300, 1), (257, 600), (520, 520)])
def test_many_blocks(dtype, sizes):
    S, T = sizes
    m, y = heads_model(dtype, B=1, H=2, S=S, T=T, D=8, E=6, mask=rough((1, 1, S, T)), drop=0.2)
    compare(m, y, tol=1e-10 if dtype == torch.float64 else 5e-5, every_subset=False)
    m = Model(dtype)
    q, k, v = m.random(1, 2, S, 8), m.random(1, 2, T, 8), m.random(1, 2, T, 5)
    mask = torch.full((S, T), -math.inf, dtype=torch.float64).triu(1)
    y = plain_attention(m, q, k, v, mask=m.constant(mask.to(dtype)))
    compare(m, y, tol=1e-10 if dtype == torch.float64 else 5e-5, every_subset=False)


def test_few_heads_are_split_over_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        m, y = heads_model(B=1, H=1, S=300, T=530, D=8, E=4, mask=rough((300, 530)), drop=0.3)
        compare(m, y)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kernels", [[], TILES])
def test_kernels_agree(kernels):
    _C.disable_kernels(kernels)
    for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        m, y = heads_model(dtype, S=9, T=21, mask=rough((1, 3, 9, 21)), where=("", torch.rand(2, 1, 1, 21) < 1.1),
                           drop=0.3)
        compare(m, y, tol=tol, every_subset=False)


def test_the_same_tensor_three_times():
    m = Model()
    x = m.heads(m.random(2, 5, 12), 2, 5, 3, 4)
    compare(m, plain_attention(m, x, x, x))


def test_against_torch():
    torch.manual_seed(SEED)
    m, y = heads_model(S=40, T=300, mask=rough((2, 1, 40, 300)))
    outputs, grads, text = step(m.bytes(y), m.tensors, [1, 1, 1, 1])
    assert "FusedAttentionGrad " in text
    leaves = [t.clone().requires_grad_() for t in m.tensors]
    q, k, v = (t.view(2, t.shape[1], 3, -1).transpose(1, 2) for t in leaves[:3])
    p = torch.softmax(q @ k.transpose(2, 3) / 2 + leaves[3], -1)
    expected = (p @ v).transpose(1, 2).reshape(2, 40, 12)
    torch.manual_seed(5)
    torch.testing.assert_close(outputs[0], expected, rtol=1e-10, atol=1e-10)
    expected.backward(torch.randn(expected.shape, dtype=torch.float64))
    for got, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_does_not_grow_with_the_square_of_the_length(dtype):
    """Nothing of rows times columns lives from forward to backward: the run of a long sequence keeps a small slab."""
    m, y = heads_model(dtype, B=1, H=4, S=1024, T=1024, D=16, E=16)
    sizes = []
    for names in (["fuse_attention"], []):
        _C.disable_passes(names)
        session = _C.Session(m.bytes(y))
        _, run = session.forward(m.tensors, b"\1\1\1", 0)
        sizes.append(session.stats()["slab_bytes"])
        run.release()
    assert sizes[1] < sizes[0] / 4, sizes
