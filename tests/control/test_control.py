"""If, Loop, Scan: results and gradients against torch, captured values, nesting, bounds."""

from __future__ import annotations

import pytest
import torch
from common import check, model_of, session_of, step, sweep_allocations

from onnxtrain import _C


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


IF = """g (double[n] x, double[n] w, bool c) => (double[n] y) {
    a = Mul(x, w)
    b = If(c) <then_branch = yes () => (double[n] p) { q = Sin(a)  p = Mul(q, x) },
               else_branch = no () => (double[n] p) { p = Exp(w) }>
    y = Add(b, x)
}"""


def test_if():
    session = session_of(IF)
    x, w = randn(5), randn(5, seed=1)
    for c in (True, False, True):
        check(session, [x, w, torch.tensor(c)], lambda x, w, c: (torch.sin(x * w) * x if c else torch.exp(w)) + x)
    stats = session.stats()
    assert stats["probe_runs"] == 3 and stats["programs_built"] == 2 and stats["program_hits"] == 1


def test_if_gradient_of_what_did_not_run_is_none():
    session = session_of("""g (double[n] x, double[n] w, bool c) => (double[n] y) {
        y = If(c) <then_branch = yes () => (double[n] p) { p = Sin(x) }, else_branch = no () => (double[n] p) { p = Sin(w) }>
    }""")
    _, grads, _ = step(session, [randn(3), randn(3), torch.tensor(True)])
    assert grads[0] is not None and grads[1] is None


def test_if_on_a_shape_needs_no_probe():
    session = session_of("""g (double[n] x) => (double[n] y) {
        five = Constant<value = int64 {5}>()
        n = Size(x)
        big = Greater(n, five)
        y = If(big) <then_branch = yes () => (double[n] p) { p = Sin(x) }, else_branch = no () => (double[n] p) { p = Cos(x) }>
    }""")
    check(session, [randn(9)], torch.sin)
    check(session, [randn(3)], torch.cos)
    assert (session.stats()["probe_runs"] == 0 and not any("Sin" in node for node, _, backward in session.kernels()
                                                           if not backward))


def test_if_on_computed_values_nested_and_of_other_shapes():
    """The branches differ in shape, the inner condition is known only behind the outer one."""
    session = session_of("""g (double[2, 3] x) => (y, z) {
        zero = Constant<value = double {0}>()
        s = ReduceSum<keepdims = 0>(x)
        pos = Greater(s, zero)
        y, z = If(pos) <
            then_branch = yes () => (p, r) {
                m = ReduceMax<keepdims = 0>(x)
                one = Constant<value = double {1}>()
                large = Greater(m, one)
                p = If(large) <then_branch = ly () => (t) { t = Mul(x, m) }, else_branch = ln () => (t) { t = Mul(x, s) }>
                r = Identity(s)
            },
            else_branch = no () => (p, r) { p = Transpose(x)  r = Neg(s) }>
    }""")

    def expected(x):
        s, m = x.sum(), x.max()
        return (x * m if m > 1 else x * s, s) if s > 0 else (x.T, -s)

    for x in (torch.full((2, 3), 0.5, dtype=torch.float64), randn(2, 3).abs() * 3, -randn(2, 3).abs()):
        x = x + torch.arange(6, dtype=torch.float64).reshape(2, 3) * 1e-3
        check(session, [x], expected)


FOR = """g (double[t, n] x, double[n] h) => (double[n] y, double[t, n] all) {
    dims = Shape<start = 0, end = 1>(x)
    none = Constant<value = int64[0] {}>()
    count = Reshape(dims, none)
    go = Constant<value = bool {1}>()
    y, all = Loop(count, go, h) <body = step (int64 i, bool c, double[n] s) => (bool c2, double[n] s2, double[n] out) {
        row = Gather<axis = 0>(x, i)
        u = Mul(row, s)
        s2 = Tanh(u)
        out = Add(s2, row)
        c2 = Identity(c)
    }>
}"""


def for_loop(x, h):
    rows = []
    for row in x:
        h = torch.tanh(row * h)
        rows.append(h + row)
    return h, torch.stack(rows) if rows else x.new_zeros(0, x.shape[1])


def test_loop_over_a_shape():
    session = session_of(FOR)
    for t in (4, 1, 0, 4):
        check(session, [randn(t, 3), randn(3, seed=1)], for_loop)
    stats = session.stats()
    assert stats["probe_runs"] == 0 and stats["programs_built"] == 3


WHILE = """g (double[n] x, double w) => (double[n] y, double[k, n] all) {
    limit = Constant<value = double {10}>()
    none = Constant<value = int64 {100}>()
    go = Constant<value = bool {1}>()
    y, all = Loop(none, go, x) <body = step (int64 i, bool c, double[n] s) => (bool c2, double[n] s2, double[n] out) {
        s2 = Mul(s, w)
        out = Sin(s2)
        size = ReduceL1<keepdims = 0>(s2)
        c2 = Less(size, limit)
    }>
}"""


def while_loop(x, w):
    rows = []
    while True:
        x = x * w
        rows.append(torch.sin(x))
        if not x.abs().sum() < 10:
            return x, torch.stack(rows)


def test_loop_until_data_says_so():
    session = session_of(WHILE)
    x = randn(3)
    for w in (1.2, 2.0, 20.0, 1.2):
        check(session, [x, torch.tensor(w, dtype=torch.float64)], while_loop)
    assert session.stats()["programs_built"] == 3


def test_loop_that_does_not_start():
    text = WHILE.replace("bool {1}", "bool {0}")
    check(session_of(text), [randn(3), torch.tensor(2.0, dtype=torch.float64)], lambda x, w: (x * 1, x.new_zeros(0, 3)))


def test_loop_with_run_time_count_and_without_states():
    session = session_of("""g (double[n] x, int64 count) => (all) {
        all = Loop(count, ) <body = step (int64 i, bool c) => (bool c2, out) {
            f = CastLike(i, x)
            out = Mul(x, f)
            c2 = Identity(c)
        }>
    }""")
    x = randn(3)
    for count in (3, 0, 5):
        check(session, [x, torch.tensor(count)], lambda x, n: x * torch.arange(int(n), dtype=x.dtype)[:, None])


def test_loops_nest_and_capture_from_all_around():
    session = session_of("""g (double[n] x, double w) => (double[n] y) {
        two = Constant<value = int64 {2}>()
        three = Constant<value = int64 {3}>()
        one = Constant<value = int64 {1}>()
        v = Exp(w)
        y = Loop(three, , x) <body = outer (int64 i, bool c, double[n] s) => (bool c2, double[n] s2) {
            base = Sin(s)
            inner = Loop(two, , s) <body = inner (int64 j, bool d, double[n] u) => (bool d2, double[n] u2) {
                odd = Equal(i, one)
                t = If(odd) <then_branch = yes () => (p) { p = Mul(u, v) }, else_branch = no () => (p) { p = Mul(u, base) }>
                u2 = Add(t, x)
                d2 = Identity(d)
            }>
            s2 = Mul(inner, base)
            c2 = Identity(c)
        }>
    }""")

    def expected(x, w):
        s, v = x, torch.exp(w)
        for i in range(3):
            base, u = torch.sin(s), s
            for _ in range(2):
                u = (u * v if i == 1 else u * base) + x
            s = u * base
        return s

    check(session, [randn(4), torch.tensor(0.3, dtype=torch.float64)], expected)
    assert session.stats()["probe_runs"] == 0


SCAN = """g (double[n] h, double[t, n] x, double[n, t] z, double[n] w) => (double[n] y, double[t, n] a, double[n, t] b) {
    y, a, b = Scan<num_scan_inputs = 2, scan_input_axes = [0, 1], scan_input_directions = [0, 1], scan_output_axes = [0, -1],
                   scan_output_directions = [1, 0], body = cell (double[n] s, double[n] xt, double[n] zt) =>
                   (double[n] s2, double[n] p, double[n] q) {
        u = Mul(s, w)
        v = Add(u, xt)
        s2 = Tanh(v)
        p = Mul(s2, zt)
        q = Sub(s2, zt)
    }>(h, x, z)
}"""


def scan(h, x, z, w):
    a, b = [], []
    for k in range(x.shape[0]):
        zt = z[:, z.shape[1] - 1 - k]
        h = torch.tanh(h * w + x[k])
        a.insert(0, h * zt)
        b.append(h - zt)
    return h, torch.stack(a), torch.stack(b, -1)


def test_scan():
    session = session_of(SCAN)
    for t in (5, 1):
        check(session, [randn(3), randn(t, 3, seed=1), randn(3, t, seed=2), randn(3, seed=3)], scan)
    outputs, _, _ = step(session, [randn(3), randn(0, 3), randn(3, 0), randn(3)])
    assert torch.equal(outputs[0], randn(3)) and outputs[1].shape == (0, 3) and outputs[2].shape == (3, 0)


def test_scan_of_opset_8():
    session = session_of("""g (double[b, n] h, double[b, t, n] x) => (double[b, n] y, double[b, t, n] all) {
        y, all = Scan<num_scan_inputs = 1, directions = [1], body = cell (double[n] s, double[n] xt) => (double[n] s2, double[n] o) {
            m = Mul(s, xt)
            s2 = Add(m, xt)
            o = Mul(s2, xt)
        }>( , h, x)
    }""", opset=8)

    def expected(h, x):
        rows = []
        for k in reversed(range(x.shape[1])):
            h = h * x[:, k] + x[:, k]
            rows.append(h * x[:, k])
        return h, torch.stack(rows, 1)

    check(session, [randn(2, 3), randn(2, 4, 3, seed=1)], expected)


def test_random_numbers_differ_by_iteration_and_agree_with_the_gradient():
    """Every iteration of nested loops drops other elements; where gradients vanish is where outputs did."""
    session = session_of("""g (double[n] x) => (double[a, b, n] y) {
        n = Constant<value = int64 {3}>()
        ratio = Constant<value = double {0.5}>()
        train = Constant<value = bool {1}>()
        y = Loop(n, ) <body = outer (int64 i, bool c) => (bool c2, rows) {
            c2 = Identity(c)
            rows = Loop(n, ) <body = inner (int64 j, bool d) => (bool d2, row) { row = Dropout(x, ratio, train)  d2 = Identity(d) }>
        }>
    }""")
    x = torch.ones(256, dtype=torch.float64)
    assert session.random
    (y,), (grad, ), (out_grad,) = step(session, [x], seed=5)
    assert y.shape == (3, 3, 256)
    masks = {tuple((row != 0).tolist()) for row in y.reshape(9, 256)}
    assert len(masks) == 9 and 0.4 < float((y != 0).double().mean()) < 0.6
    assert torch.allclose(grad, (out_grad * y).sum((0, 1)))
    assert torch.equal(step(session, [x], seed=5)[0][0], y) and not torch.equal(step(session, [x], seed=6)[0][0], y)


def test_random_condition_is_the_one_that_ran():
    """The probe draws what the program then draws: the branch that is taken agrees with the number that is returned."""
    session = session_of("""g (double[n] x) => (double s, double y) {
        ratio = Constant<value = double {0.5}>()
        train = Constant<value = bool {1}>()
        half = Constant<value = double {4}>()
        d = Dropout(x, ratio, train)
        s = ReduceSum<keepdims = 0>(d)
        c = Greater(s, half)
        y = If(c) <then_branch = yes () => (p) { p = Identity(s) }, else_branch = no () => (p) { p = Neg(s) }>
    }""")
    signs = set()
    for seed in range(12):
        (s, y), _, _ = step(session, [torch.ones(4, dtype=torch.float64)], seed=seed)
        assert float(y) == (float(s) if s > 4 else -float(s))
        signs.add(bool(s > 4))
    assert signs == {True, False}


def test_a_loop_that_never_ends_is_refused():
    session = session_of("""g (double[n] x) => (double[n] y) {
        y = Loop( , , x) <body = step (int64 i, bool c, double[n] s) => (bool c2, double[n] s2) { s2 = Sin(s)  c2 = Identity(c) }>
    }""")
    with pytest.raises(_C.UnsupportedError, match=r"Loop '.*': more than 20000 iterations: a loop is unrolled"):
        session.forward([randn(2)], b"\0")


BAD = [
    ("y = If(c) <then_branch = a () => (p) { p = Sin(x) }>", "attribute else_branch is missing"),
    ("y = If(x) <then_branch = a () => (p) { p = Sin(x) }, else_branch = b () => (p) { p = Cos(x) }>",
     "one bool is expected"),
    ("y, z = If(c) <then_branch = a () => (p) { p = Sin(x) }, else_branch = b () => (p) { p = Cos(x) }>",
     "has 1 outputs, at least 2"),
    ("y = Loop(n, c, x) <body = b (int64 i, bool d) => (bool e, p) { e = Identity(d)  p = Sin(x) }>",
     "body has 2 inputs, 3 are given"),
    ("y = Loop(n, c, x) <body = b (int64 i, bool d, s) => (bool e) { e = Identity(d) }>", "the body has 1 outputs"),
    ("y = Scan<num_scan_inputs = 3, body = b (s) => (p) { p = Sin(s) }>(x)", "num_scan_inputs is 3"),
    ("y = Scan<num_scan_inputs = 1, scan_input_axes = [4], body = b (s) => (p) { p = Sin(s) }>(x)", "axis 4"),
]


@pytest.mark.parametrize("line,match", BAD, ids=lambda v: v if " " not in v else "")
def test_errors(line, match):
    session = session_of("g (double[2] x, bool c, int64 n) => (y) { " + line + " }")
    with pytest.raises((ValueError, _C.UnsupportedError), match=match):
        session.forward([randn(2), torch.tensor(False), torch.tensor(2)], bytes(3))


def test_a_scan_of_opset_8_without_inputs():
    """Its inputs less the leading sequence_lens must not wrap: 2^32 - 1 of them are 32 GiB of pointers."""
    text = "g () => (y) { y = Scan<num_scan_inputs = 4294967295, body = b (s) => (p) { p = Sin(s) }>() }"
    with pytest.raises(ValueError, match="num_scan_inputs is 4294967295, with 0 inputs"):
        session_of(text, opset=8).forward([], b"")


def test_unknown_names_and_operators_in_a_body_are_named():
    text = "g (double[2] x, bool c) => (y) { y = If(c) <then_branch = a () => (p) { p = Sin(NAME) }, else_branch = b () => (p) { p = Cos(x) }> }"
    with pytest.raises(ValueError, match="then_branch.*input 'nowhere' is not defined"):
        session_of(text.replace("NAME", "nowhere"))
    model = model_of(text.replace("NAME", "x"))
    model.graph.node[0].attribute[0].g.node[0].op_type = "Strange"
    with pytest.raises(_C.UnsupportedError, match=r"operator ai\.onnx\.Strange"):
        _C.Session(model.SerializeToString())


def test_bodies_inside_functions():
    """A function whose body has an If over an input and an attribute of the call."""
    text = """g (double[n] x, bool c) => (double[n] y) { y = local.choose <by = 2.0> (c, x) }
<domain: "local", opset_import: ["" : 20]>
choose <by> (c, v) => (r) {
    f = Constant<value_float: float = @by>()
    k = CastLike(f, v)
    r = If(c) <then_branch = yes () => (p) { p = Mul(v, k) }, else_branch = no () => (p) { q = Constant<value_float: float = @by>()
               qq = CastLike(q, v)  p = Sub(v, qq) }>
}"""
    model = model_of(text)
    model.opset_import.add(domain="local", version=1)
    session = _C.Session(model.SerializeToString())
    for c in (True, False):
        check(session, [randn(3), torch.tensor(c)], lambda x, c: x * 2 if c else x - 2)


@pytest.mark.parametrize("text,inputs", [
    (IF, [randn(3), randn(3), torch.tensor(True)]),
    (FOR, [randn(2, 3), randn(3)]),
    (WHILE, [randn(2), torch.tensor(20.0, dtype=torch.float64)]),
    (SCAN, [randn(3), randn(2, 3), randn(3, 2), randn(3)]),
], ids=["if", "for", "while", "scan"])
def test_failures_leak_nothing(text, inputs):
    sweep_allocations(text, inputs)
