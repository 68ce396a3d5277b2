"""Sequences and optionals are resolved while a program is built, with gradients through them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from common import check, model_of, session_of, step, sweep_allocations
from containers import ContainersBackend

from onnxtrain import _C


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def arrays(*tensors):
    return [t.numpy() for t in tensors]


@pytest.mark.parametrize("split,sizes", [("", [1] * 5), ("two", [2, 2, 1]), ("list", [1, 3, 1])])
def test_split_and_concat(split, sizes):
    session = session_of("g (double[5, n] x, double[n] w) => (double[5, n] y) { two = Constant<value = int64 {2}>()\n"
                         "list = Constant<value = int64[3] {1, 3, 1}>()\n zero = Constant<value = int64 {0}>()\n"
                         f"s = SplitToSequence<axis = 0>({'x, ' + split if split else 'x'})\n"
                         """first = SequenceAt(s, zero)
                            changed = Mul(first, w)
                            rest = SequenceErase(s, zero)
                            all = SequenceInsert(rest, changed)
                            y = ConcatFromSequence<axis = -2>(all)
                         }""")

    def expected(x, w):
        parts = x.split(sizes)
        return torch.cat([*parts[1:], parts[0] * w])

    check(session, [randn(5, 3), randn(3, seed=1)], expected)
    assert session.stats()["probe_runs"] == 0


def test_split_without_the_axis_and_stack():
    session = session_of("""g (double[m, n] x) => (double[n, m] y) {
        s = SplitToSequence<axis = 1, keepdims = 0>(x)
        y = ConcatFromSequence<axis = 0, new_axis = 1>(s)
    }""")
    check(session, [randn(2, 3)], lambda x: x.T * 1)


def test_positions_at_run_time():
    session = session_of("""g (double[3, n] x, double[n] w, int64 i, int64 j) => (double[n] y, double[k, n] z) {
        s = SplitToSequence<axis = 0, keepdims = 0>(x)
        y = SequenceAt(s, i)
        longer = SequenceInsert(s, w, j)
        z = ConcatFromSequence<axis = 0, new_axis = 1>(longer)
    }""")

    def expected(x, w, i, j):
        rows = list(x)
        at = int(j) + 3 if j < 0 else int(j)
        return rows[int(i)] * 1, torch.stack(rows[:at] + [w] + rows[at:])

    x, w = randn(3, 2), randn(2, seed=1)
    for i, j in ((0, 0), (-1, 3), (2, -1), (-3, -3)):
        check(session, [x, w, torch.tensor(i), torch.tensor(j)], expected)
    for i, j in ((3, 0), (0, 4), (-4, 0), (0, -4)):
        with pytest.raises(IndexError, match="out of range for a sequence of 3"):
            session.forward([x, w, torch.tensor(i), torch.tensor(j)], bytes(4))


LOOP = """g (double[t, n] x, int64 count) => (double[k, n] y) {
    none = SequenceEmpty<dtype = 11>()
    s = Loop(count, , none) <body = step (int64 i, bool c, seq(double[n]) s) => (bool c2, seq(double[n]) s2) {
        row = Gather<axis = 0>(x, i)
        v = Sin(row)
        s2 = SequenceInsert(s, v)
        c2 = Identity(c)
    }>
    length = SequenceLength(s)
    f = CastLike(length, x)
    m = ConcatFromSequence<axis = 0, new_axis = 1>(s)
    y = Mul(m, f)
}"""


def test_a_loop_fills_a_sequence():
    """What TorchScript makes of a list that a loop appends to."""
    session = session_of(LOOP)
    for count in (4, 2):
        check(session, [randn(4, 3), torch.tensor(count)], lambda x, n: torch.sin(x[: int(n)]) * int(n))
    with pytest.raises(ValueError, match="the sequence is empty"):
        session.forward([randn(4, 3), torch.tensor(0)], bytes(2))


def test_branches_give_sequences_and_identity_hands_them_on():
    session = session_of("""g (double[4] x, bool c) => (seq(double[n]) r) {
        two = Constant<value = int64 {2}>()
        s = If(c) <then_branch = yes () => (p) { q = SplitToSequence(x, two)  p = Identity(q) },
                   else_branch = no () => (p) { v = Sin(x)  p = SequenceConstruct(v, x, v) }>
        r = Identity(s)
    }""")
    check(session, [randn(4), torch.tensor(True)], lambda x, c: x.split(2))
    check(session, [randn(4), torch.tensor(False)], lambda x, c: (torch.sin(x), x * 1, torch.sin(x)))
    outputs, run = session.forward([randn(4), torch.tensor(True)], b"\1\0")
    assert isinstance(outputs[0], list) and run.differentiable == b"\1\1"


def test_map():
    session = session_of("""g (double[4, n] x, double[n] w) => (seq(double[m]) a, seq(double[m]) b) {
        s = SplitToSequence<keepdims = 0>(x)
        a, b = SequenceMap(s, w) <body = each (double[n] row, double[n] v) => (double[n] p, double[n] q) {
            p = Mul(row, v)
            q = Add(p, w)
        }>
    }""")
    check(session, [randn(4, 3), randn(3, seed=1)], lambda x, w: [*(r * w for r in x), *(r * w + w for r in x)])


def test_optionals():
    session = session_of("""g (double[n] x, bool c) => (double[n] y, bool has, bool none, optional(double[n]) o) {
        full = Optional(x)
        empty = Optional<type : type_proto = double>()
        o = If(c) <then_branch = yes () => (p) { p = Identity(full) }, else_branch = no () => (p) { p = Identity(empty) }>
        has = OptionalHasElement(o)
        none = OptionalHasElement()
        y = If(has) <then_branch = y2 () => (p) { e = OptionalGetElement(o)  p = Sin(e) }, else_branch = n2 () => (p) { p = Cos(x) }>
    }""")
    x = randn(3)
    for c in (True, False):
        outputs, _ = session.forward([x, torch.tensor(c)], b"\0\0")
        assert torch.equal(outputs[0], torch.sin(x) if c else torch.cos(x))
        assert bool(outputs[1]) == c and not bool(outputs[2])
        assert torch.equal(outputs[3], x) if c else outputs[3] is None
    check(session, [x, torch.tensor(True)], lambda x, c: (torch.sin(x), torch.tensor(True), torch.tensor(False), x * 1))


def test_scalars_in_a_loop_over_an_optional_sequence():
    """As test_loop16_seq_none of the ONNX suite, whose comparison cannot handle items of rank 0."""
    rep = ContainersBackend.prepare(model_of("""g (int64 count, bool go, optional(seq(float)) o) => (seq(float[]) r) {
        r = Loop(count, go, o) <body = step (int64 i, bool c, optional(seq(float)) o2) => (bool c2, seq(float) s2) {
            c2 = Identity(c)
            has = OptionalHasElement(o2)
            none = Not(has)
            s = If(none) <else_branch = e () => (p) { p = OptionalGetElement(o2) },
                          then_branch = t () => (p) { k = Constant<value = float {0}>()  p = SequenceConstruct(k) }>
            x = Constant<value = float[5] {1, 2, 3, 4, 5}>()
            one = Constant<value = int64 {1}>()
            from = Constant<value = int64[1] {0}>()
            end = Add(i, one)
            axis = Constant<value = int64 {0}>()
            to = Unsqueeze(end, axis)
            part = Slice(x, from, to)
            s2 = SequenceInsert(s, part)
        }>
    }"""))
    for given in ([np.array(0.0, np.float32)], None):
        (items,) = rep.run([np.array(5), np.array(True), given])
        assert [i.tolist() for i in items] == [0.0, [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]


BAD = [
    ("y = Sin(s)", "input 0 .* is a sequence, a tensor is expected"),
    ("y = SequenceLength(x)", "input 0 is a tensor, a sequence is expected"),
    ("t = SequenceConstruct(x, i)  y = SequenceLength(t)", "item 1 is int64, item 0 is double"),
    ("t = SequenceConstruct(s)  y = SequenceLength(t)", "item 0 is not a tensor"),
    ("y = ConcatFromSequence(s)", "attribute axis is missing"),
    ("e = Optional<type : type_proto = double>()  y = OptionalGetElement(e)", "the optional has no element"),
    ("z = Constant<value = int64 {0}>()  t = SplitToSequence(x, z)  y = SequenceLength(t)", "split is 0"),
]


@pytest.mark.parametrize("line,match", BAD, ids=[b[1] for b in BAD])
def test_errors(line, match):
    session = session_of("g (double[2] x, int64 i) => (y) { s = SequenceConstruct(x, x)  " + line + " }")
    with pytest.raises((ValueError, TypeError, _C.UnsupportedError), match=match):
        session.forward([randn(2), torch.tensor(0)], bytes(2))


def test_a_float_that_decides_and_lies_in_a_sequence_keeps_its_gradient():
    session = session_of("""g (double x) => (double y) {
        zero = Constant<value = double {0}>()
        one = Constant<value = double {1}>()
        first = Constant<value = int64 {0}>()
        two = Mul(x, x)
        steps = Range(zero, two, one)
        s = SequenceConstruct(two, two)
        item = SequenceAt(s, first)
        total = ReduceSum<keepdims = 0>(steps)
        y = Mul(item, total)
    }""")
    for value in (2.0, 1.5):
        check(session, [torch.tensor(value, dtype=torch.float64)],
              lambda x: x * x * torch.arange(0, value * value, dtype=torch.float64).sum())


def test_failures_leak_nothing():
    sweep_allocations(LOOP, [randn(3, 2), torch.tensor(2)])


def test_steps_have_no_sequences():
    session = session_of(LOOP)
    step(session, [randn(4, 3), torch.tensor(4)])
    assert "Sequence" not in session.text("program")
