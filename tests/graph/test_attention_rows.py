"""Attention reads packed rows where they lie: the same results and gradients as over all rows, from every kernel."""

from __future__ import annotations

import math

import pytest
import torch
from seeds import drawn_seed
from test_causal_mask import added, lower
from test_fuse_attention import Model, plain_attention

from onnxtrain import _C

SEED = drawn_seed()
CLASSES = 5
KERNELS = {"tiles": [], "ref": ["attention_tiles", "attention_grad_tiles"]}


@pytest.fixture(autouse=True)
def as_it_was():
    threads = torch.get_num_threads()
    _C.disable_passes(["+pack_rows"])
    yield
    torch.set_num_threads(threads)
    _C.disable_passes([])
    _C.disable_kernels([])


def seen_keys(how: str, batch: int, length: int) -> torch.Tensor:
    """(batch, length): the keys that the mask lets through, at least one of each sequence."""
    lengths = torch.randint(1, max(2, 2 * length // 3), (batch, 1))
    places = torch.arange(length)[None]
    if "left" in how:
        return places >= length - lengths
    if "gaps" in how:
        return (torch.rand(batch, length) < 0.4) | (places == torch.randint(length, (batch, 1)))
    return places < lengths


def weight(m: Model, rows: int, columns: int) -> str:
    return m.input(torch.randn(rows, columns, dtype=torch.float64) / math.sqrt(rows))


def projections(m: Model, x: str, how: str, sizes: tuple[int, int, int, int]) -> list[str]:
    """Q, K and V by heads."""
    batch, heads, length, width = sizes
    if "together" not in how:
        return [m.heads(m("MatMul", x, weight(m, heads * width, heads * width)), batch, length, heads, width)
                for _ in range(3)]
    joined = m("Reshape", m("MatMul", x, weight(m, heads * width, 3 * heads * width)),
               m.ints(batch, length, 3, heads, width))
    return [m("Squeeze", part, m.ints(0)) for part in
            m("Split", m("Transpose", joined, perm=[2, 0, 3, 1, 4]), n=3, axis=0, num_outputs=3)]


def causal_attention(m: Model, operands: tuple[str, str, str], where: str, sizes: tuple[int, int, int, int]) -> str:
    """With zeros for a query that sees no key, as one of left padding."""
    _, _, length, width = sizes
    q, k, v = operands
    s = m("Mul", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), m.constant(1 / math.sqrt(width)))
    s = m("Where", where, m("Add", s, added(m, lower(m, length, length, 0), length, length)), m.constant(-math.inf))
    p = m("Softmax", s, axis=-1)
    p = m("Where", m("IsNaN", p), m.constant(0.0), p)
    p = m("Dropout", p, m.constant(0.3, torch.float32), m.constant(True, torch.bool))
    return m("MatMul", p, v)


def layer(m: Model, x: str, where: str, how: str, sizes: tuple[int, int, int, int]) -> str:
    batch, heads, length, width = sizes
    q, k, v = projections(m, x, how, sizes)
    options = {"where": where, "fill": -1e38}
    if "bias" in how:
        penalty = m("Where", where, m.constant(0.0), m.constant(-math.inf))
        options = {"mask": m("Add", m.random(1, heads, length, length), penalty)}
    if "causal" in how:
        y = causal_attention(m, (q, k, v), where, sizes)
    else:
        y = plain_attention(m, q, k, v, d=width, drop=0.3, **options)
    return m("Add", x, m("Reshape", m("Transpose", y, perm=[0, 2, 1, 3]), m.ints(batch, length, heads * width)))


def model_of(how: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> tuple[Model, str]:
    """One layer of attention, two if it is causal, a head, and a loss of some tokens, or of the first ones."""
    batch, heads, length, width = sizes
    m = Model(dtype)
    seen = seen_keys(how, batch, length)
    x, where = m.random(batch, length, heads * width), m.input(seen[:, None, None])
    for _ in range(2 if "causal" in how else 1):
        x = layer(m, x, where, how, sizes)
    scores = m("MatMul", x, weight(m, heads * width, CLASSES))
    if "first" in how:
        return m, m("Gather", scores, m.constant(0, torch.int64), axis=1)
    labels = torch.where(seen & (torch.rand(seen.shape) < 0.6), torch.randint(CLASSES, seen.shape), -100)
    labels[:, 1::3] = -100  # whatever the seed, the loss reads fewer rows than there are tokens
    labels[:, -1] = 0 if "outside" in how else labels[:, -1]
    rows = m("Reshape", scores, m.ints(-1, CLASSES))
    return m, m("SoftmaxCrossEntropyLoss", rows, m("Reshape", m.input(labels), m.ints(-1)), reduction="sum",
                ignore_index=-100)


def step(session: _C.Session, m: Model) -> list[torch.Tensor | None]:
    wants = bytes([t.is_floating_point() for t in m.tensors])
    outputs, run = session.forward(m.tensors, wants, 11)
    saved = [m.tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    torch.manual_seed(5)
    return [*outputs, *run.backward(saved, [torch.randn(y.shape, dtype=torch.float64).to(y) for y in outputs])]


def check(how: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], kernels: str, threads: int) -> str:
    """The text of the program over packed rows."""
    m, y = model_of(how, dtype, sizes)
    data = m.bytes(y)
    _C.disable_kernels(KERNELS["ref"])
    torch.set_num_threads(1)
    expected = step(_C.Session(data), m)
    _C.disable_kernels(KERNELS[kernels])
    torch.set_num_threads(threads)
    packed = _C.Session(data, rows=7)
    tolerance = 1e-11 if dtype == torch.float64 else 3e-5
    for got, wanted in zip(step(packed, m), expected, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            scale = max(1.0, float(wanted.abs().max()))
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * scale,
                                       msg=lambda text: f"{how} {sizes} seed {SEED}: {text}")
    return packed.text("program")


def attentions(text: str) -> list[int]:
    """Of each forward node: the number of its operands, 11 where it reads packed rows."""
    return [len(line.rpartition(" (")[2].split(",")) for line in text.splitlines() if "FusedAttention " in line]


MASKS = ["right", "left", "gaps", "right bias", "gaps bias", "left outside", "causal right", "causal left",
         "causal gaps", "together right", "together gaps", "together causal left"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("how", MASKS)
def test_masks(how, dtype, kernels):
    """Dropout on. A causal layer reads packed rows if its queries are those of its keys: not the last one,
    unless one tensor holds both."""
    torch.manual_seed(SEED)
    found = attentions(check(how, dtype, (4, 2, 12, 6), kernels, 2))
    assert found[0] == 11 and (len(found) == 1 or (found[1] == 11) == ("together" in how))


@pytest.mark.parametrize("how", ["right", "gaps bias", "causal left", "first right", "first gaps"])
@pytest.mark.parametrize("sizes", [(2, 1, 300, 16), (3, 2, 500, 9), (5, 3, 33, 32), (2, 2, 1200, 8)], ids=str)
def test_blocks(sizes, how):
    """Sequences of several blocks of queries and keys, on more threads than there are batch indices."""
    torch.manual_seed(SEED)
    check(how, torch.float32, sizes, "tiles", 7)
    check(how, torch.float64, sizes, "ref", 7)


@pytest.mark.parametrize("kernels", KERNELS)
def test_first_tokens_alone(kernels):
    """The queries are one of each sequence, whatever the keys are."""
    torch.manual_seed(SEED)
    text = check("first right", torch.float64, (4, 2, 12, 6), kernels, 1)
    assert "double[4,1,12]" in text.replace(" ", "")


def test_bfloat16():
    """Attention of the processor's own bfloat16 products, where it has some, in a float32 model. Rounding differs."""
    torch.manual_seed(SEED)
    batch, heads, length, width = 3, 2, 300, 32
    m = Model(torch.float32)
    seen = seen_keys("gaps", batch, length)
    x, where = m.random(batch, length, heads * width), m.input(seen[:, None, None])
    q, k, v = (m.heads(m("Cast", m("MatMul", x, weight(m, heads * width, heads * width)), to=16), batch, length, heads,
                       width) for _ in range(3))
    s = m("Mul", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), m("Cast", m.constant(width ** -0.5), to=16))
    s = m("Where", where, s, m("Cast", m.constant(-math.inf), to=16))
    p = m("Dropout", m("Softmax", s, axis=-1), m.constant(0.3, torch.float32), m.constant(True, torch.bool))
    y = m("Transpose", m("Cast", m("MatMul", p, v), to=1), perm=[0, 2, 1, 3])
    y = m("Add", x, m("Reshape", y, m.ints(batch, length, heads * width)))
    rows = m("Reshape", m("MatMul", y, weight(m, heads * width, CLASSES)), m.ints(-1, CLASSES))
    labels = torch.where(seen & (torch.rand(seen.shape) < 0.6), 1, -100)
    loss = m("SoftmaxCrossEntropyLoss", rows, m("Reshape", m.input(labels), m.ints(-1)), reduction="mean",
             ignore_index=-100)
    data = m.bytes(loss)
    packed, plain = _C.Session(data, rows=7), _C.Session(data)
    for got, wanted in zip(step(packed, m), step(plain, m), strict=True):
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
    text = packed.text("program")
    assert attentions(text) in ([], [11])  # none where the processor has no such products


def test_a_sequence_without_keys():
    """Where a masked row counts as zeros: a whole sequence of padding has no row at all."""
    torch.manual_seed(SEED)
    m = Model()
    x = m.random(3, 8, 6)
    seen = torch.ones(3, 8, dtype=torch.bool)
    seen[1], seen[2, 4:] = False, False
    where = m.input(seen[:, None, None])
    y = causal_attention(m, tuple(projections(m, x, "", (3, 2, 8, 3))), where, (3, 2, 8, 3))
    y = m("Reshape", m("Transpose", y, perm=[0, 2, 1, 3]), m.ints(3, 8, 6))
    labels = torch.where(seen, 1, -100)
    rows = m("Reshape", m("MatMul", m("Add", x, y), m.random(6, CLASSES)), m.ints(-1, CLASSES))
    loss = m("SoftmaxCrossEntropyLoss", rows, m("Reshape", m.input(labels), m.ints(-1)), reduction="sum",
             ignore_index=-100)
    data = m.bytes(loss)
    packed = _C.Session(data, rows=7)
    for kernels in KERNELS.values():
        _C.disable_kernels(kernels)
        for got, wanted in zip(step(_C.Session(data, rows=7), m), step(_C.Session(data), m), strict=True):
            if wanted is not None:
                torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    step(packed, m)
    assert packed.stats()["key_rows"] == 12
