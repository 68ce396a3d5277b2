"""Rotary position embeddings as models write them become one Rotate node, in front of the Transpose that gives their
input; numbers and gradients, those of the angles included, stay those of the nodes one by one.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from seeds import drawn_seed
from test_fuse_attention import Model, as_it_was, step  # noqa: F401

from onnxtrain import _C

SEED = drawn_seed()


def halves(m: Model, x: str, size: int, slices: bool) -> list[str]:
    if not slices:
        return m("Split", x, axis=-1, num_outputs=2, n=2)
    first = m("Slice", x, m.ints(0), m.ints(size // 2), m.ints(-1), m.ints(1))
    return [first, m("Slice", x, m.ints(-(size // 2)), m.ints(2**62), m.ints(3))]


def rotary(m: Model, x: str, cos: str, sin: str, size: int, slices: bool = False, order: int = 0) -> str:
    """x * cos + (-b, a) * sin; bits of `order` swap the operands of the three nodes."""
    def commuted(op: str, a: str, b: str, bit: int) -> str:
        return m(op, b, a) if order >> bit & 1 else m(op, a, b)

    a, b = halves(m, x, size, slices)
    turned = m("Concat", m("Neg", b), a, axis=-1)
    return commuted("Add", commuted("Mul", x, cos, 0), commuted("Mul", turned, sin, 1), 2)


def same(m: Model, y: str, fused: int, tol: float = 1e-12) -> str:
    """With and without the pass, for every subset of inputs that wants gradients; the last program's text."""
    data, n = m.bytes(y), len(m.tensors)
    for wants in itertools.product((False, True), repeat=n):
        _C.disable_passes(["fuse_rotary"])
        plain_y, plain_grads, plain = step(data, m.tensors, wants)
        _C.disable_passes([])
        got_y, grads, text = step(data, m.tensors, wants)
        assert "Rotate" not in plain
        for what, (a, b) in enumerate(zip([*plain_y, *plain_grads], [*got_y, *grads], strict=True)):
            assert (a is None) == (b is None), (SEED, wants, what)
            if a is not None:
                torch.testing.assert_close(b, a, rtol=tol, atol=tol, msg=lambda t: f"{SEED} {wants} {what}: {t}")
    forward = [line for line in text.splitlines() if "Rotate (" in line]
    assert len(forward) == fused, text
    return text


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("slices", [False, True], ids=["split", "slice"])
@pytest.mark.parametrize("order", range(8))
def test_as_the_nodes_one_by_one(dtype, tol, slices, order):
    torch.manual_seed(SEED)
    m = Model(dtype)
    x, cos, sin = m.random(2, 3, 5, 8), m.random(5, 8), m.random(1, 1, 5, 8)
    text = same(m, rotary(m, x, cos, sin, 8, slices, order), 1, tol)
    assert "Concat" not in text[:text.index("# backward")], text


@pytest.mark.parametrize("shapes", [
    ((8,), (8,), (8,)), ((4, 2), (4, 2), (2,)), ((3, 34), (1, 34), (3, 34)), ((1, 1, 2), (2,), (2,)),
    ((2, 0, 6), (6,), (6,)), ((2, 3, 4, 5, 6), (3, 1, 1, 6), (5, 6)), ((700, 2, 130), (700, 1, 130), (130,))], ids=str)
def test_sizes_and_broadcasts(shapes):
    torch.manual_seed(SEED)
    m = Model()
    x, cos, sin = (m.random(*shape) for shape in shapes)
    same(m, rotary(m, x, cos, sin, shapes[0][-1]), 1)


@pytest.mark.parametrize("perm", [[0, 2, 1, 3], [2, 0, 1, 3], [1, 2, 0, 3]], ids=str)
@pytest.mark.parametrize("angles", [(5, 8), (2, 1, 5, 8), (2, 3, 5, 8), (1, 1, 1, 8)], ids=str)
def test_a_transpose_of_whole_rows_goes_behind(perm, angles):
    torch.manual_seed(SEED)
    shape, before = (2, 3, 5, 8), [0] * 4
    for to, source in enumerate(perm):
        before[source] = shape[to]
    m = Model()
    x, cos, sin = m.random(*before), m.random(*angles), m.random(5, 8)
    text = same(m, rotary(m, m("Transpose", x, perm=perm), cos, sin, 8), 1)
    assert "Rotate (in0, " in text, text


def test_a_transpose_of_features_stays_in_front():
    m = Model()
    x, cos, sin = m.random(8, 5), m.random(5, 8), m.random(8)
    same(m, rotary(m, m("Transpose", x, perm=[1, 0]), cos, sin, 8), 1)


def test_attention_reads_through_it():
    """Queries and keys as linear layers give them: no copy is left between these and attention."""
    torch.manual_seed(SEED)
    m = Model()
    cos, sin = m.random(16, 8), m.random(16, 8)
    q, k, v = (m.heads(m("MatMul", m.random(2, 16, 24), m.random(24, 32)), 2, 16, 4, 8) for _ in range(3))
    q, k = (rotary(m, t, cos, sin, 8) for t in (q, k))
    p = m("Softmax", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    y = m("Reshape", m("Transpose", m("MatMul", p, v), perm=[0, 2, 1, 3]), m.ints(2, 16, 32))
    data = m.bytes(y)
    got, grads, text = step(data, m.tensors, [True] * len(m.tensors))
    _C.disable_passes(["fuse_rotary"])
    want, expected, _ = step(data, m.tensors, [True] * len(m.tensors))
    for a, b in zip([*got, *grads], [*want, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-9)
    assert "FusedAttention " in text and " = Transpose " not in text[:text.index("# backward")], text


def test_under_casts():
    """x of 16 bits, which autocast leaves beside angles in float32: halves are taken of the 16 bits, and cast behind.
    The gradient is rounded once, where the two parts of it were rounded each."""
    torch.manual_seed(SEED)
    m = Model(torch.bfloat16)
    x = m.random(2, 5, 8)
    m.dtype = torch.float32
    cos, sin = m.random(5, 8), m.random(5, 8)
    a, b = halves(m, x, 8, False)
    turned = m("Cast", m("Concat", m("Neg", b), a, axis=-1), to=1)
    y = m("Add", m("Mul", m("Cast", x, to=1), cos), m("Mul", turned, sin))
    same(m, y, 1, 2**-6)


def under_autocast(kind: str) -> tuple[Model, str]:
    """x and y of 16 bits, with the angles' float32 between; `kind` says what stands in the way."""
    torch.manual_seed(SEED)
    m = Model(torch.bfloat16)
    x = m.random(2, 5, 4, 8)
    m.dtype = torch.float32
    a, b = halves(m, x, 8, False)
    turned = m("Cast", m("Concat", m("Neg", b), a, axis=-1), to=1)
    y = m("Add", m("Mul", m("Cast", x, to=1), m.random(5, 1, 8)), m("Mul", turned, m.random(1, 8)))
    y = m("Unsqueeze", m("Transpose", y, perm=[0, 2, 1, 3]), m.ints(2))
    wide = m("Reshape", m("Expand", y, m.ints(2, 4, 3, 5, 8)), m.ints(2, 12, 5, 8))
    narrow = m("Cast", m("Exp", wide) if kind == "arithmetic" else wide, to=10 if kind == "another type" else 16)
    result = m("Cast", narrow, to=1)
    return m, m("Add", result, m("ReduceMax", y, keepdims=0)) if kind == "a reader" else m("Mul", result, result)


def test_casts_go_into_the_node():
    """Its result has 16 bits, and what is repeated has them, too. The CPU, for which the pass is not meant, casts
    around the node. Gradients of repeated elements are rounded once more."""
    m, y = under_autocast("")
    data = m.bytes(y)
    want, expected, plain = step(data, m.tensors, [True] * 3)
    _C.disable_passes(["+narrow_rotary"])
    got, grads, text = step(data, m.tensors, [True] * 3)
    assert " float[2,4,3,5,8]" in plain and " bfloat16[2,4,3,5,8]" not in plain, plain
    forward = text[:text.index("# backward")]
    assert " float[2,4,3,5,8]" not in forward and " bfloat16[2,4,3,5,8]" in forward, text
    assert torch.equal(got[0], want[0])
    for a, b in zip(expected, grads, strict=True):
        torch.testing.assert_close(b.float(), a.float(), rtol=2**-6, atol=2**-5 * a.abs().max().item())


@pytest.mark.parametrize("kind", ["arithmetic", "another type", "a reader"])
def test_casts_stay_where_more_than_moves_is_between(kind):
    m, y = under_autocast(kind)
    data = m.bytes(y)
    want, expected, plain = step(data, m.tensors, [True] * 3)
    _C.disable_passes(["+narrow_rotary"])
    got, grads, text = step(data, m.tensors, [True] * 3)
    assert text == plain and "Rotate" in text
    assert all(torch.equal(a, b) for a, b in zip([*want, *expected], [*got, *grads], strict=True))


def wrong(m: Model, kind: str) -> str:
    x, cos, sin, other = m.random(2, 4, 8), m.random(4, 8), m.random(4, 8), m.random(2, 4, 8)
    a, b = m("Split", x, axis=-1, num_outputs=2, n=2)
    turned = {"no sign": lambda: m("Concat", b, a, axis=-1),
              "the other sign": lambda: m("Concat", b, m("Neg", a), axis=-1),
              "not swapped": lambda: m("Concat", m("Neg", a), b, axis=-1),
              "of another": lambda: m("Concat", m("Neg", halves(m, other, 8, False)[1]), a, axis=-1),
              "uneven": lambda: m("Concat", m("Neg", m("Slice", x, m.ints(3), m.ints(8), m.ints(-1))),
                                  m("Slice", x, m.ints(0), m.ints(3), m.ints(-1)), axis=-1),
              "every second": lambda: m("Concat", m("Neg", m("Slice", x, m.ints(1), m.ints(8), m.ints(-1), m.ints(2))),
                                        m("Slice", x, m.ints(0), m.ints(8), m.ints(-1), m.ints(2)), axis=-1),
              "another axis": lambda: m("Concat", *(lambda h: (m("Neg", h[1]), h[0]))(
                  m("Split", x, axis=1, num_outputs=2, n=2)), axis=1)}.get(kind)
    turned = turned() if turned else m("Concat", m("Neg", b), a, axis=-1)
    if kind == "a difference":
        return m("Sub", m("Mul", x, cos), m("Mul", turned, sin))
    if kind == "angles of one feature":
        cos = m.random(4, 1)
    if kind == "larger angles":
        sin = m.random(3, 1, 4, 8)
    return m("Add", m("Mul", other if kind == "another plain" else x, cos), m("Mul", turned, sin))


@pytest.mark.parametrize("kind", ["no sign", "the other sign", "not swapped", "of another", "uneven", "every second",
                                  "another axis", "a difference", "angles of one feature", "larger angles",
                                  "another plain"])
def test_what_only_looks_like_it_stays(kind):
    torch.manual_seed(SEED)
    m = Model()
    y = wrong(m, kind)
    data = m.bytes(y)
    got, grads, text = step(data, m.tensors, [True] * len(m.tensors))
    assert "Rotate" not in text
    _C.disable_passes(["fuse_rotary"])
    want, expected, _ = step(data, m.tensors, [True] * len(m.tensors))
    for a, b in zip([*got, *grads], [*want, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_others_may_read_the_parts():
    torch.manual_seed(SEED)
    m = Model()
    x, cos, sin = m.random(2, 4, 8), m.random(4, 8), m.random(4, 8)
    a, b = m("Split", x, axis=-1, num_outputs=2, n=2)
    turned = m("Concat", m("Neg", b), a, axis=-1)
    product = m("Mul", turned, sin)
    y = m("Add", m("Add", m("Mul", x, cos), product), m("Add", m("Exp", product), m("Sin", turned)))
    same(m, y, 1)
