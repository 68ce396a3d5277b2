"""Attention of float32 in blocks with products of our own, against the kernel that takes one row after the other."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys

import onnx
import pytest
import torch
from seeds import drawn_seed
from test_causal_mask import added, lower
from test_fuse_attention import Model, plain_attention, rough, step

from onnxtrain import _C

SEED = drawn_seed()
TILES = ["attention_tiles", "attention_grad_tiles"]
# rows, columns, size of a head, size of its values: below, at and beyond vectors, tiles and blocks
SIZES = [(1, 1, 1, 1), (5, 3, 7, 9), (33, 47, 16, 17), (64, 64, 64, 64), (129, 385, 33, 100), (257, 800, 100, 20),
         (400, 390, 48, 128), (300, 771, 80, 112), (13, 1200, 8, 8)]


@pytest.fixture(autouse=True)
def as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    _C.disable_kernels([])


def masked(m: Model, S: int, T: int, how: str) -> dict[str, str]:
    """Options of plain_attention."""
    if how == "bias":
        return {"mask": m.input(rough((1, 1, S, T)))}
    if how == "padding":
        seen = torch.rand(1, 1, 1, T) < 0.8
        seen[..., 0] = True
        return {"where": m.input(seen)}
    if how.startswith("causal"):
        return {"mask": added(m, lower(m, S, T, int(how.split()[1])), S, T)}
    return {}


def agree(m: Model, y: str, kernels: list[str], others: list[str], threads: int, hint: object) -> None:
    """`kernels` declined against `others` declined, for all gradients at once and for each alone."""
    floats = [i for i, t in enumerate(m.tensors) if t.is_floating_point()]
    data = m.bytes(y)
    for subset in (floats, *([i] for i in floats)):
        wants = [i in subset for i in range(len(m.tensors))]
        _C.disable_kernels(others)
        torch.set_num_threads(1)
        expected = step(data, m.tensors, wants)
        _C.disable_kernels(kernels)
        torch.set_num_threads(threads)
        got = step(data, m.tensors, wants)
        for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                scale = max(1.0, float(b.abs().max()))
                torch.testing.assert_close(a, b, rtol=3e-5, atol=3e-5 * scale, equal_nan=True,
                                           msg=lambda text: f"{hint} seed {SEED} {subset}: {text}")


@pytest.mark.parametrize("how", ["plain", "bias", "padding", "causal 0", "causal 70"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_rows_one_by_one(sizes, how):
    S, T, D, E = sizes
    torch.manual_seed(SEED)
    m = Model(torch.float32)
    heads = random.Random(str((SEED, sizes, how))).choice([1, 2, 3])  # fewer than threads: over blocks
    q, k, v = m.random(1, heads, S, D), m.random(1, heads, T, D), m.random(1, heads, T, E)
    y = plain_attention(m, q, k, v, d=D, drop=0.25 if (S + T) % 2 else 0.0, **masked(m, S, T, how))
    agree(m, y, [], TILES, threads=2, hint=heads)


def test_rows_without_a_column_and_values_that_are_not_finite():
    torch.manual_seed(SEED)
    mask = rough((40, 300))
    mask[7] = -math.inf
    m = Model(torch.float32)
    q, k, v = m.random(1, 2, 40, 16), m.random(1, 2, 300, 16), m.random(1, 2, 300, 16)
    y = plain_attention(m, q, k, v, d=16, mask=m.input(mask))
    agree(m, y, [], TILES, 2, "an empty row")
    assert step(m.bytes(y), m.tensors, [0, 0, 0, 0])[0][0][:, :, 7].isnan().all()
    for place, value in ((0, math.nan), (1, math.inf), (2, -math.inf), (2, math.nan)):
        m = Model(torch.float32)
        q, k, v = m.random(1, 1, 40, 16), m.random(1, 1, 300, 16), m.random(1, 1, 300, 16)
        m.tensors[place][0, 0, 30, 5] = value
        agree(m, plain_attention(m, q, k, v, d=16), [], TILES, 2, (place, value))


def test_far_scores_neither_overflow_nor_underflow():
    """Scores hundreds apart: exponentials of 0 and rows whose largest score comes in the last block."""
    torch.manual_seed(SEED)
    m = Model(torch.float32)
    q, k, v = m.random(1, 2, 30, 16), m.random(1, 2, 900, 16), m.random(1, 2, 900, 16)
    m.tensors[1] *= torch.linspace(1, 60, 900)[:, None]
    agree(m, plain_attention(m, q, k, v, d=16), [], TILES, 2, "far")


def narrow_model(S: int, T: int, D: int, E: int, how: str) -> tuple[Model, str]:
    """Products in bfloat16 and a softmax in float32, as autocast has them."""
    m = Model(torch.bfloat16)
    q, k, v = m.random(2, 3, S, D), m.random(2, 3, T, D), m.random(2, 3, T, E)
    scale = m.constant(D ** -0.5, torch.float32)
    seen = torch.arange(T).expand(2, 1, 1, T) < T - T // 3
    s = m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2]))
    if how.endswith("bias"):
        s = m("Mul", s, m("Cast", scale, to=onnx.TensorProto.BFLOAT16))
        s = m("Add", s, m.random(1, 3, S, T) if how == "bias" else
              m.input(torch.where(seen, 0, torch.finfo(torch.bfloat16).min)))
    s = m("Cast", s, to=onnx.TensorProto.FLOAT)
    if not how.endswith("bias"):
        s = m("Mul", s, scale)
    if how == "causal":
        s = m("Add", s, m.constant(torch.full((S, T), -math.inf).triu(1), torch.float32))
    if how == "padding":
        s = m("Where", m.input(seen), s, m.constant(-math.inf, torch.float32))
    p = m("Softmax", s, axis=-1)
    if how == "dropout":
        p = m("Dropout", p, m.constant(0.3, torch.float32), m.constant(True, torch.bool))
    return m, m("MatMul", m("Cast", p, to=onnx.TensorProto.BFLOAT16), v)


@pytest.mark.parametrize("how", ["plain", "causal", "padding", "bias", "padding bias", "dropout"])
@pytest.mark.parametrize("sizes", [(1, 600, 2, 2), (1, 600, 16, 16), (70, 1025, 64, 32), (513, 513, 64, 64),
                                   (130, 515, 34, 100), (33, 47, 64, 64), (128, 129, 66, 18)], ids=str)
def test_bfloat16_is_no_worse_than_its_parts(sizes, how):
    """Against the same computed in float64 where nothing is dropped, against the parts where something is."""
    torch.manual_seed(SEED)
    S, T, D, E = sizes
    m, y = narrow_model(S, T, D, E, how)
    data, wants = m.bytes(y), [t.is_floating_point() for t in m.tensors]
    fused = step(data, m.tensors, wants)
    _C.disable_passes(["fuse_attention"])
    apart = step(data, m.tensors, wants)
    _C.disable_passes([])
    leaves = [t.double().requires_grad_() for t in m.tensors if t.is_floating_point()]
    mask = torch.full((S, T), -math.inf, dtype=torch.float64).triu(1) if how == "causal" else None
    mask = m.tensors[3] if how == "padding" else leaves[3] if how.endswith("bias") else mask
    exact = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], attn_mask=mask)
    torch.manual_seed(5)
    exact.backward(torch.randn(exact.shape, dtype=torch.float64).bfloat16().double())
    for i, truth in enumerate([exact.detach(), *(leaf.grad for leaf in leaves)]):
        got, other = (([*r[0], *r[1]])[i].double() for r in (fused, apart))
        assert got.shape == truth.shape
        most = float(other.abs().max())
        if how == "dropout":
            assert float((got - other).abs().max()) < 0.03 * most + 1e-3, (SEED, i)
        else:
            bound = 1.3 * float((other - truth).norm()) + 2**-8 * float(truth.norm())
            assert float((got - truth).norm()) <= bound, (SEED, i)


@pytest.mark.parametrize("dtype, drop", [(torch.float32, 0), (torch.float32, 0.3), (torch.float64, 0),
                                         (torch.float64, 0.3), (torch.bfloat16, 0)], ids=str)
def test_a_score_that_is_alone_has_no_gradient(dtype, drop):
    """Its probability is 1 whatever it is: exactly 0 for Q and for K, as where the row's gradient is of the parts."""
    torch.manual_seed(SEED)
    if dtype == torch.bfloat16:
        m, y = narrow_model(1, 600, 24, 40, "causal")
    else:
        m = Model(dtype)
        q, k, v = (m.random(2, 3, n, d) for n, d in ((1, 24), (600, 24), (600, 40)))
        y = plain_attention(m, q, k, v, d=24, drop=drop, mask=added(m, lower(m, 1, 600, 0), 1, 600))
    outputs, grads, text = step(m.bytes(y), m.tensors, [t.is_floating_point() for t in m.tensors])
    assert "AttentionGrad" in text and not grads[0].any() and not grads[1].any()
    assert drop or (grads[2][:, :, 0].any() and not grads[2][:, :, 1:].any())


def test_the_other_instruction_sets():
    """In a process of its own: the set is chosen once."""
    options = ["-q", "-p", "no:cacheprovider", __file__, "-k", "rows_one_by_one and 129"]
    for isa in ("avx2", "plain"):
        done = subprocess.run([sys.executable, "-m", "pytest", *options], env={**os.environ, "ONNXTRAIN_ISA": isa},
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
