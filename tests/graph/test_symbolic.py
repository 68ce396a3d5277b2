"""Session.infer(): shapes in terms of the symbols of the inputs."""

from __future__ import annotations

import pytest
import torch
from common import session_of

from onnxtrain import _C


def infer(text, opset=20):
    return session_of(text, opset).infer()


def test_elementwise_products_and_views():
    found = infer("""g (float[b, t, 8] x, float[8, d] w, float[d] c) => (y, z, f) {
        h = MatMul(x, w)
        y = Add(h, c)
        z = Flatten<axis = 2>(y)
        s = ReduceSum<keepdims = 0>(x)
        perm = Transpose<perm = [2, 0, 1]>(x)
        f = Greater(perm, s)
    }""")
    assert found["x"] == ("float", ("b", "t", 8)) and found["h"] == ("float", ("b", "t", "d"))
    assert found["y"] == ("float", ("b", "t", "d")) and found["z"] == ("float", ("b*t", "d"))
    assert found["s"] == ("float", ()) and found["f"] == ("bool", (8, "b", "t"))


def test_shape_subgraphs_and_arithmetic():
    found = infer("""g (float[b, t] x, float[b, u] y) => (cat, padded, half, twice, flat) {
        cat = Concat<axis = 1>(x, y)
        pads = Constant<value = int64[4] {0, 1, 0, 2}>()
        padded = Pad(x, pads)
        one = Constant<value = int64[1] {1}>()
        minus = Constant<value = int64[1] {-1}>()
        shorter = Slice(x, one, minus, one)
        half = Identity(shorter)
        twice = Concat<axis = 0>(x, x)
        dims = Shape(x)
        last = Gather<axis = 0>(dims, one)
        all = Concat<axis = 0>(last, minus)
        flat = Reshape(x, all)
    }""")
    assert found["cat"] == ("float", ("b", "t + u")) and found["padded"] == ("float", ("b", "t + 3"))
    assert found["half"] == ("float", ("b", "t - 2")) and found["twice"] == ("float", ("2*b", "t"))
    assert found["flat"] == ("float", ("t", "b")) and found["dims"] == ("int64", (2,))


def test_sizes_that_must_divide():
    """A head split of a dim that is a symbol works at multiples only."""
    found = infer("""g (float[b, e] x) => (y) {
        shape = Constant<value = int64[3] {0, 4, -1}>()
        y = Reshape(x, shape)
        z = Mul(y, y)
    }""")
    assert found["y"] == ("float", ("b", 4, None))


def test_dims_without_names_are_unknown_in_results():
    found = infer("g (float[b, ?] x) => (y, z) { y = Sin(x)  z = Transpose(x) }")
    assert found["y"] == ("float", ("b", None)) and found["z"] == ("float", (None, "b"))


def test_control_flow_and_contents():
    found = infer("""g (float[t, n] x, float[n] h, bool c, int64 k) => (y, all, a, b, q) {
        dims = Shape<start = 0, end = 1>(x)
        none = Constant<value = int64[0] {}>()
        count = Reshape(dims, none)
        y, all = Loop(count, , h) <body = step (int64 i, bool c0, s) => (bool c2, s2, out) {
            row = Gather<axis = 0>(x, i)
            s2 = Mul(row, s)
            out = Concat<axis = 0>(s2, row)
            c2 = Identity(c0)
        }>
        a = NonZero(x)
        b = If(c) <then_branch = p () => (r) { r = Sin(x) }, else_branch = m () => (r) { r = Cos(h) }>
        q = SplitToSequence(x)
    }""")
    assert found["y"] == ("float", ("n",)) and found["all"] == ("float", ("t", "2*n"))
    assert "a" not in found and "b" not in found and "q" not in found


def test_failures():
    with pytest.raises(ValueError, match="Add.*broadcast"):
        infer("g (float[a, 3] x, float[a, 4] y) => (z) { z = Add(x, y) }")
    session = session_of("g (float[n, m] x) => (y) { t = Transpose(x)  y = MatMul(x, t) }")
    session.infer()
    live = _C.live_blocks()
    for countdown in range(2000):
        _C.fail_allocation_after(countdown)
        try:
            session.infer()
            failed = False
        except MemoryError:
            failed = True
        finally:
            _C.fail_allocation_after(-1)
        assert _C.live_blocks() == live
        if not failed:
            return
    raise AssertionError("too many allocations")


def test_what_is_inferred_is_what_comes_out():
    """Every expression holds at a size that was not tried."""
    session = session_of("""g (float[b, c, h, w] x, float[k, c, 3, 3] f) => (y, z, p) {
        y = Conv<pads = [1, 1, 1, 1]>(x, f)
        z = Conv(x, f)
        p = GlobalAveragePool(y)
    }""")
    found = session.infer()
    sizes = {"b": 2, "c": 3, "h": 9, "w": 10, "k": 4}
    outputs, _ = session.forward([torch.randn(2, 3, 9, 10), torch.randn(4, 3, 3, 3)], b"\0\0")
    for name, tensor in zip(("y", "z", "p"), outputs, strict=True):
        dims = [d if isinstance(d, int) else eval(d, {}, sizes) for d in found[name][1]]
        assert tuple(dims) == tuple(tensor.shape), name
