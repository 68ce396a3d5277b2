"""Attention as exporters write it becomes one node, forward and backward;
the numbers stay those of the nodes one by one.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from seeds import drawn_seed

from onnxtrain import _C

SEED = drawn_seed()
TILES = ["attention_tiles", "attention_grad_tiles"]
TYPES = {torch.float32: onnx.TensorProto.FLOAT, torch.float64: onnx.TensorProto.DOUBLE,
         torch.bfloat16: onnx.TensorProto.BFLOAT16,
         torch.float16: onnx.TensorProto.FLOAT16, torch.bool: onnx.TensorProto.BOOL,
         torch.int64: onnx.TensorProto.INT64}


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    _C.disable_passes([])
    _C.disable_kernels([])


class Model:
    """Nodes one after the other; every method gives the name of what it computes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype, self.nodes, self.inputs, self.tensors, self.constants, self.n = dtype, [], [], [], [], 0

    def name(self) -> str:
        self.n += 1
        return f"v{self.n}"

    def input(self, tensor: torch.Tensor) -> str:
        tensor = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        self.inputs.append(helper.make_tensor_value_info(f"in{len(self.tensors)}", TYPES[tensor.dtype], tensor.shape))
        self.tensors.append(tensor)
        return self.inputs[-1].name

    def random(self, *shape: int) -> str:
        return self.input(torch.randn(*shape, dtype=torch.float64))

    def constant(self, value, dtype: torch.dtype | None = None) -> str:
        tensor = torch.as_tensor(value, dtype=dtype or self.dtype)
        if tensor.dtype == torch.bfloat16:
            raise ValueError("no constants in bfloat16 here")
        self.constants.append(numpy_helper.from_array(tensor.numpy(), self.name()))
        return self.constants[-1].name

    def ints(self, *values: int) -> str:
        return self.constant(values, torch.int64)

    def __call__(self, op: str, *inputs: str, n: int = 1, **attributes):
        outputs = [self.name() for _ in range(n)]
        self.nodes.append(helper.make_node(op, inputs, outputs, **attributes))
        return outputs[0] if n == 1 else outputs

    def heads(self, x: str, batch: int, length: int, heads: int, size: int) -> str:
        return self("Transpose", self("Reshape", x, self.ints(batch, length, heads, size), allowzero=1),
                    perm=[0, 2, 1, 3])

    def bytes(self, *outputs: str) -> bytes:
        graph = helper.make_graph(self.nodes, "g", self.inputs, [onnx.ValueInfoProto(name=y) for y in outputs],
                                  self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def step(model: bytes, tensors, wants, seed=11):
    """Outputs, gradients, and the text of the program."""
    session = _C.Session(model)
    outputs, run = session.forward(tensors, bytes(wants), seed)
    if run is None:
        return list(outputs), [], session.text("program")
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    torch.manual_seed(5)
    grads = run.backward(saved, [torch.randn(y.shape, dtype=torch.float64).to(y.dtype) for y in outputs])
    return list(outputs), list(grads), session.text("program")


def count(text: str) -> int:
    """Nodes that do something; Casts of 16-bit floats, which products of the processor's own need not, are left out."""
    return len([line for line in text[text.index("\n{"):].splitlines()
                if " = " in line and " = Reshape " not in line and " = Cast " not in line])


def compare(model: Model, *outputs: str, fused: int | None = 1, tol: float = 1e-10, every_subset: bool = True,
            inner: int = 99):
    """
    The same with and without the pass, for every subset of inputs that wants gradients; with it there are `fused`
    nodes, and fewer nodes in all. The first `inner` inputs go into attention. The text of the last program.
    """
    data, floats = model.bytes(*outputs), [i for i, t in enumerate(model.tensors) if t.is_floating_point()]
    subsets = ([s for r in range(len(floats) + 1) for s in itertools.combinations(floats, r)] if every_subset
               else [tuple(floats)])
    for subset in subsets:
        wants = [i in subset for i in range(len(model.tensors))]
        _C.disable_passes(["fuse_attention"])
        plain_y, plain_grads, plain = step(data, model.tensors, wants)
        _C.disable_passes([])
        y, grads, text = step(data, model.tensors, wants)
        for what, (expected, got) in enumerate(zip([*plain_y, *plain_grads], [*y, *grads], strict=True)):
            assert (expected is None) == (got is None), (subset, what)
            if expected is not None:
                torch.testing.assert_close(got, expected, rtol=tol, atol=tol, equal_nan=True,
                                           msg=lambda m: f"{subset} {what}: {m}")
        if fused is not None:
            assert "FusedAttention" not in plain
            assert text.count("FusedAttention ") == fused, text
            assert text.count("FusedAttentionGrad ") == (fused if any(i < inner for i in subset) else 0), text
            # Casts around it.
            assert not fused or count(text) < count(plain) or model.dtype in (torch.bfloat16, torch.float16)
            assert not fused or "Softmax" not in text
    return text


SIZES = dict(B=2, H=3, S=5, T=7, D=4)


def plain_attention(m: Model, q: str, k: str, v: str, *, scale="q", d=4, mask=None, where=None, fill=-math.inf,
                    drop=0.0, transposed=False) -> str:
    """softmax(scale Q K' + mask) V in the words of the exporters."""
    kt = k if transposed else m("Transpose", k, perm=[0, 1, 3, 2])
    factor = 1 / math.sqrt(d)
    if scale == "q":
        q = m("Mul", q, m.constant(factor))
    if scale == "both":
        q, kt = m("Mul", q, m.constant(math.sqrt(factor))), m("Mul", kt, m.constant(math.sqrt(factor)))
    s = m("MatMul", q, kt)
    if scale == "mul":
        s = m("Mul", s, m.constant(factor))
    if scale == "div":
        s = m("Div", s, m.constant(1 / factor))
    if mask:
        s = m("Add", s, mask)
    if where:
        s = m("Where", where, s, m.constant(fill)) if where[0] != "!" else m("Where", where[1:], m.constant(fill), s)
    p = m("Softmax", s, axis=-1)
    if drop:
        p = m("Dropout", p, m.constant(drop, torch.float32), m.constant(True, torch.bool))
    return m("MatMul", p, v)


def heads_model(dtype=torch.float64, B=2, H=3, S=5, T=7, D=4, E=4, **options):
    """Q, K and V apart, each [B, length, H D]."""
    m = Model(dtype)
    q, k, v = m.random(B, S, H * D), m.random(B, T, H * D), m.random(B, T, H * E)
    mask = options.pop("mask", None)
    where = options.pop("where", None)
    if mask is not None:
        mask = m.input(mask) if isinstance(mask, torch.Tensor) else mask(m)
    if where is not None:
        flag, tensor = where
        where = flag + m.input(tensor)
    y = plain_attention(m, m.heads(q, B, S, H, D), m.heads(k, B, T, H, D), m.heads(v, B, T, H, E), d=D or 1, mask=mask,
                        where=where, **options)
    y = m("Reshape", m("Transpose", y, perm=[0, 2, 1, 3]), m.ints(B, S, H * E), allowzero=1)
    return m, y


@pytest.mark.parametrize("scale", ["q", "both", "mul", "div", "none"])
def test_scale_stands_anywhere(scale):
    m, y = heads_model(scale=scale)
    text = compare(m, y)
    assert "Transpose" not in text and "Expand" not in text


def rough(shape, lowest=-math.inf):
    """A float mask with -inf here and there, never in column 0."""
    mask = torch.randn(shape, dtype=torch.float64)
    mask[torch.rand(shape) < 0.3] = lowest
    mask[..., 0] = 0.5
    return mask


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 1, 1, 7), (5, 7), (3, 5, 7), (3, 1, 1), (1, 5, 1), (7,),
                                   (2, 1, 5, 7)])
def test_masks_that_are_added_have_gradients(shape):
    torch.manual_seed(SEED)
    m, y = heads_model(mask=torch.randn(shape, dtype=torch.float64))
    compare(m, y)


@pytest.mark.parametrize("causal", ["", "first", "second"])
def test_two_masks_are_added_up(causal):
    """A bias by position, and a mask of what is padding or ahead."""
    m = Model()
    q, k, v, bias = m.random(2, 3, 6, 4), m.random(2, 3, 6, 4), m.random(2, 3, 6, 4), m.random(1, 3, 6, 6)
    ahead = m.constant(torch.full((6, 6), -math.inf, dtype=torch.float64).triu(1))
    masks = [ahead, bias] if causal == "first" else [bias, ahead if causal else m.random(2, 1, 1, 6)]
    s = m("Add", masks[1], m("Add", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), masks[0]))
    assert ("causal = 1" in compare(m, m("MatMul", m("Softmax", s, axis=-1), v))) == bool(causal)


@pytest.mark.parametrize("lowest", [-math.inf, -1e9, -1e4, float(torch.finfo(torch.float32).min)])
def test_masks_that_hide(lowest):
    torch.manual_seed(SEED)
    m, y = heads_model(mask=rough((2, 1, 5, 7), lowest))
    compare(m, y)


@pytest.mark.parametrize("flag", ["", "!"])
@pytest.mark.parametrize("fill", [-math.inf, -1e9, -3.0])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 1, 1, 7), (5, 7), (3, 5, 1)])
def test_masks_that_replace(flag, fill, shape):
    torch.manual_seed(SEED)
    hidden = torch.rand(shape) < 0.4
    if shape[-1] > 1 and math.isinf(fill):
        hidden[..., 0] = False
    if shape[-1] == 1 and math.isinf(fill):
        hidden[:] = False
    m, y = heads_model(where=(flag, hidden if flag else ~hidden), fill=fill,
                       mask=torch.randn(5, 7, dtype=torch.float64))
    compare(m, y, every_subset=shape == (5, 7))


def test_rows_without_a_column():
    mask = torch.zeros(5, 7, dtype=torch.float64)
    mask[2] = -math.inf
    m, y = heads_model(mask=mask)
    compare(m, y)
    m, y = heads_model(where=("", mask == 0))
    compare(m, y)
    assert step(m.bytes(y), m.tensors, [0] * 4)[0][0][:, 2].isnan().all()


def test_values_that_are_not_finite_come_out_as_they_would():
    for place, value in itertools.product(range(3), (math.nan, math.inf, -math.inf)):
        m, y = heads_model(scale="mul")
        m.tensors[place][1, 3, 5] = value
        compare(m, y, every_subset=False)


@pytest.mark.parametrize("diagonal", [0, 2, -1, -2])
@pytest.mark.parametrize("form", ["added", "least", "where", "where not"])
@pytest.mark.parametrize("sizes", [(6, 6), (4, 9), (9, 4)])
def test_constant_causal_masks_are_known(diagonal, form, sizes):
    S, T = sizes
    seen = torch.ones(S, T, dtype=torch.bool).tril(diagonal)
    lowest = {"added": -math.inf, "least": float(np.finfo(np.float64).min)}.get(form)
    m = Model()
    q, k, v = m.random(2, 3, S, 4), m.random(2, 3, T, 4), m.random(2, 3, T, 4)
    options = {}
    if lowest:
        options["mask"] = m.constant(torch.zeros(S, T, dtype=torch.float64).masked_fill(~seen, lowest))
    else:
        options["where"] = m.constant(seen, torch.bool) if form == "where" else "!" + m.constant(~seen, torch.bool)
    y = plain_attention(m, q, k, v, **options)
    text = compare(m, y)
    assert ("causal = 1" in text) == (diagonal >= 0)  # else there are rows without any column


def test_constant_masks_that_are_not_causal_stay():
    for change in ((0, 3), (5, 1)):
        mask = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf)
        mask[change] = 0 if math.isinf(mask[change]) else -math.inf
        m = Model()
        q, k, v = (m.random(2, 3, 6, 4) for _ in range(3))
        y = plain_attention(m, q, k, v, mask=m.constant(mask))
        assert "causal" not in compare(m, y, every_subset=False)


def ones(m: Model, S: int, T: int, dtype: torch.dtype = torch.bool) -> str:
    return m("Expand", m.constant(1, dtype), m.ints(S, T))


def compared(m: Model, op: str, S: int, T: int, diagonal: int = 0, rows_first: bool = False) -> str:
    """Numbers of columns against those of rows plus the diagonal."""
    columns, rows = m.constant(torch.arange(T), torch.int64), m.constant(torch.arange(S)[:, None] + diagonal, torch.int64)
    return m(op, rows, columns) if rows_first else m(op, columns, rows)


def lower(m: Model, S: int, T: int, k: int) -> str:
    return m("Trilu", ones(m, S, T), m.constant(k, torch.int64), upper=0)


def added(m: Model, seen: str, S: int, T: int) -> str:
    zeros = m("Expand", m.constant(0.0), m.ints(S, T))
    return m("Where", m("Not", seen), m.constant(-math.inf), zeros)


# How a mask of S x T is made, the diagonal of what it lets through, whether it is added, and whether that is causal.
LARGE_MASKS = {
    "torch's": (lambda m, S, T: added(m, lower(m, S, T, 0), S, T), 0, True, True),
    "torch's, later columns": (lambda m, S, T: added(m, lower(m, S, T, 3), S, T), 3, True, True),
    "torch's, an empty row": (lambda m, S, T: added(m, lower(m, S, T, -1), S, T), -1, True, False),
    "triu of -inf": (lambda m, S, T: m("Trilu", m("Expand", m.constant(-math.inf), m.ints(S, T)), m.ints(1)), 0, True, True),
    "triu with its diagonal": (lambda m, S, T: m("Trilu", m("Expand", m.constant(-math.inf), m.ints(S, T)), m.ints(0)), -1, True, False),
    "times -1e9": (lambda m, S, T: m("Mul", m("Sub", m.constant(1.0), m("Trilu", ones(m, S, T, torch.float64), m.ints(0), upper=0)),
                                     m.constant(-2e9)), 0, True, True),
    "times -1": (lambda m, S, T: m("Mul", m("Sub", m.constant(1.0), m("Trilu", ones(m, S, T, torch.float64), m.ints(0), upper=0)),
                                   m.constant(-1.0)), None, True, False),
    "two diagonals": (lambda m, S, T: m("And", lower(m, S, T, 2), lower(m, S, T, 1)), 1, False, False),
    "all of it and a part": (lambda m, S, T: m("And", ones(m, S, T), m("Or", lower(m, S, T, 2), lower(m, S, T, 2))), 2, False, True),
    "as numbers": (lambda m, S, T: m("Cast", m("Cast", lower(m, S, T, 4), to=onnx.TensorProto.DOUBLE), to=onnx.TensorProto.BOOL), 4, False, True),
    "under another shape": (lambda m, S, T: m("Unsqueeze", lower(m, S, T, 0), m.ints(0, 1)), 0, False, True),
    "all": (lambda m, S, T: ones(m, S, T), 10000, False, True),
    "none at the right": (lambda m, S, T: compared(m, "Less", S, T), -1, False, False),
    "Less": (lambda m, S, T: compared(m, "Less", S, T, 3), 2, False, True),
    "LessOrEqual": (lambda m, S, T: compared(m, "LessOrEqual", S, T), 0, False, True),
    "Greater, rows first": (lambda m, S, T: compared(m, "Greater", S, T, 5, True), 4, False, True),
    "GreaterOrEqual, rows first": (lambda m, S, T: compared(m, "GreaterOrEqual", S, T, 0, True), 0, False, True),
    "not Greater": (lambda m, S, T: m("Not", compared(m, "Greater", S, T, 1)), 1, False, True),
    "not GreaterOrEqual": (lambda m, S, T: m("Not", compared(m, "GreaterOrEqual", S, T, 1)), 0, False, True),
    "not LessOrEqual, rows first": (lambda m, S, T: m("Not", compared(m, "LessOrEqual", S, T, 2, True)), 1, False, True),
    "not Less, rows first": (lambda m, S, T: m("Not", compared(m, "Less", S, T, 2, True)), 2, False, True),
    "a ramp of two": (lambda m, S, T: m("Less", m.constant(torch.arange(T), torch.int64), m.constant(2 * torch.arange(S)[:, None] + 1, torch.int64)),
                      None, False, False),
    "the other side": (lambda m, S, T: compared(m, "GreaterOrEqual", S, T), None, False, False),
}


@pytest.mark.parametrize("sizes", [(1030, 1025), (1025, 1030)])
@pytest.mark.parametrize("name", LARGE_MASKS)
def test_large_masks_are_known_by_what_makes_them(name, sizes):
    """They are too large to be folded to constants."""
    S, T = sizes
    make, diagonal, is_added, causal = LARGE_MASKS[name]
    m = Model()
    q, k, v = m.random(1, 1, S, 2), m.random(1, 1, T, 2), m.random(1, 1, T, 2)
    mask = make(m, S, T)
    y = plain_attention(m, q, k, v, **{"mask" if is_added else "where": mask})
    text = compare(m, y, every_subset=False)
    assert ("causal = 1" in text) == causal
    assert not causal or f"causal_offset = {min(diagonal, T - 1)}" in text


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


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize("hidden", [False, True])
def test_probabilities_that_are_nan_are_zero(dtype, tol, hidden):
    """The form in models of the TorchScript exporter; a row that is hidden entirely gives zeros and no gradient, as in torch."""
    mask = rough((5, 7)).to(dtype)
    if hidden:
        mask[3] = -math.inf
    m = Model(dtype)
    q, k, v = m.random(2, 3, 5, 4), m.random(2, 3, 7, 4), m.random(2, 3, 7, 4)
    p = m("Softmax", m("Add", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), m.input(mask)), axis=-1)
    y = m("MatMul", m("Where", m("IsNaN", p), m.constant(0.0), p), v)
    if not hidden:
        assert "zero_nan" in compare(m, y, tol=tol)
        return
    outputs, grads, text = step(m.bytes(y), m.tensors, [1, 1, 1, 0])
    leaves = [t.clone().requires_grad_() for t in m.tensors[:3]]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=1.0)
    torch.manual_seed(5)
    expected.backward(torch.randn(expected.shape, dtype=torch.float64).to(dtype))
    assert "FusedAttentionGrad " in text and not outputs[0][:, :, 3].any()
    for got, want in zip([outputs[0], *grads[:3]], [expected, *(leaf.grad for leaf in leaves)], strict=True):
        torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def test_the_same_tensor_three_times():
    m = Model()
    x = m.heads(m.random(2, 5, 12), 2, 5, 3, 4)
    compare(m, plain_attention(m, x, x, x))


def test_a_part_of_a_long_tensor_is_cut_out():
    m = Model()
    q, x, v = m.random(2, 3, 5, 4), m.random(2, 3, 40, 4), m.random(2, 3, 7, 4)
    k = m("Slice", x, m.ints(3), m.ints(10), m.ints(2))
    assert "Slice" in compare(m, plain_attention(m, q, k, v))


@pytest.mark.parametrize("how", ["expand", "products"])
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_grouped_queries_copy_no_key(how, drop):
    B, KV, G, S, T, D = 2, 3, 2, 5, 7, 4
    m = Model()
    q, k, v = m.random(B, KV * G, S, D), m.random(B, KV, T, D), m.random(B, KV, T, D)
    mask = m.random(B, 1, S, T)
    if how == "expand":
        k, v = (m("Reshape", m("Expand", m("Unsqueeze", t, m.ints(2)), m.ints(B, KV, G, T, D)),
                  m.ints(B, KV * G, T, D)) for t in (k, v))
        y = plain_attention(m, q, k, v, mask=mask, drop=drop)
    else:
        s = m("MatMul", m("Reshape", q, m.ints(B, KV, G * S, D)), m("Transpose", k, perm=[0, 1, 3, 2]))
        p = m("Softmax", m("Add", m("Reshape", s, m.ints(B, KV * G, S, T)), mask), axis=-1)
        if drop:
            p = m("Dropout", p, m.constant(drop, torch.float32), m.constant(True, torch.bool))
        y = m("Reshape", m("MatMul", m("Reshape", p, m.ints(B, KV, G * S, T)), v), m.ints(B, KV * G, S, D))
    assert "Expand" not in compare(m, m("Transpose", y, perm=[0, 2, 1, 3]))


def test_batches_that_broadcast():
    m = Model()
    q, k, v = m.random(2, 3, 5, 4), m.random(3, 7, 4), m.random(1, 1, 7, 6)
    compare(m, m("MatMul", m("Softmax", m("MatMul", q, m("Transpose", k, perm=[0, 2, 1])), axis=-1), v))


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


def test_rows_taken_out_are_zero():
    B, H, S, T, D = 2, 3, 5, 7, 4
    empty = torch.rand(B, 1, S, 1) < 0.4
    m = Model()
    q, k, v, gone = m.random(B, H, S, D), m.random(B, H, T, D), m.random(B, H, T, D), m.input(empty)
    y = m("Where", gone, m.constant(0.0), plain_attention(m, q, k, v, mask=m.random(5, 7), drop=0.2))
    text = compare(m, m("Transpose", y, perm=[0, 2, 1, 3]))
    assert "Where" not in text and "Transpose" not in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [7, 2048])
def test_narrow_floats(dtype, columns):
    """In float32 all the way where there is much of it; short rows are faster apart,
    with products of their own type.
    """
    torch.manual_seed(SEED)
    m = Model(dtype)
    q, k, v, mask = m.random(2, 3, 5, 4), m.random(2, 3, columns, 4), m.random(2, 3, columns, 4), m.random(5, columns)
    s = m("Cast", m("Add", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), mask), to=onnx.TensorProto.FLOAT)
    y = m("MatMul", m("Cast", m("Softmax", s, axis=-1), to=TYPES[dtype]), v)
    compare(m, y, tol=0.1, fused=1 if columns == 2048 else 0)


@pytest.mark.parametrize("kernels", [[], TILES])
@pytest.mark.parametrize("length", [255, 511, 512])
def test_long_causal_rows_of_narrow_floats_are_one_node(length, kernels):
    """Half of the scores need no computing: worth float32 from 512 columns, and earlier where a kernel has no need of it."""
    torch.manual_seed(SEED)
    m = Model(torch.bfloat16)
    q, k, v = (m.random(1, 2, length, 8) for _ in range(3))
    s = m("Cast", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), to=onnx.TensorProto.FLOAT)
    hidden = m.constant(torch.full((length, length), -math.inf).triu(1), torch.float32)
    y = m("MatMul", m("Cast", m("Softmax", m("Add", s, hidden), axis=-1), to=TYPES[torch.bfloat16]), v)
    _C.disable_kernels(kernels)
    fused = 1 if length == 512 else 0 if length == 255 or kernels else None  # None: as the processor has it
    compare(m, y, tol=0.1, fused=fused, every_subset=False)


def test_zero_sizes_are_left_alone():
    for sizes in (dict(B=0), dict(S=0), dict(T=0), dict(D=0), dict(E=0)):
        m, y = heads_model(scale="none", **{**SIZES, **sizes})
        compare(m, y, fused=0, every_subset=False)


def declined(name):
    m = Model()
    q, k, v = m.random(2, 3, 5, 4), m.random(2, 3, 5, 4), m.random(2, 3, 5, 4)
    kt = m("Transpose", k, perm=[0, 1, 3, 2])
    s = m("MatMul", q, kt)
    if name == "another axis":
        return m, [m("MatMul", m("Softmax", s, axis=2), v)]
    if name == "log":
        return m, [m("MatMul", m("LogSoftmax", s, axis=-1), v)]
    if name == "scaled after the mask":
        s = m("Mul", m("Add", s, m.random(5, 5)), m.constant(0.5))
    if name == "masked three times":
        s = m("Add", m("Add", m("Add", s, m.random(5, 5)), m.random(5, 5)), m.random(5))
    if name == "added after replacing":
        s = m("Add", m("Where", m.input(torch.rand(5, 5) < 0.5), s, m.constant(-3.0)), m.random(5, 5))
    if name == "scale not known":
        s = m("Mul", s, m.input(torch.tensor(0.5)))
    if name == "tanh":
        s = m("Tanh", s)
    p = m("Softmax", s, axis=-1)
    if name == "scores used elsewhere":
        return m, [m("MatMul", p, v), m("Tanh", s)]
    if name == "probabilities used elsewhere":
        return m, [m("MatMul", p, v), m("ReduceMean", p)]
    if name == "probabilities handed out":
        return m, [m("MatMul", p, v), p]
    if name == "dropout's choice used":
        p, kept = m("Dropout", p, m.constant(0.5, torch.float32), m.constant(True, torch.bool), n=2)
        return m, [m("MatMul", p, v), m("Cast", kept, to=11)]
    if name == "probabilities transposed":
        p = m("Transpose", p, perm=[0, 1, 3, 2])
    if name == "probabilities scaled":
        p = m("Mul", p, m.constant(0.5))
    if name == "second operand":
        return m, [m("MatMul", m("Transpose", v, perm=[0, 1, 3, 2]), p)]
    return m, [m("MatMul", p, v)]


@pytest.mark.parametrize("name", ["another axis", "log", "scaled after the mask", "masked three times",
                                  "added after replacing", "scale not known", "tanh", "scores used elsewhere",
                                  "probabilities used elsewhere", "probabilities handed out", "dropout's choice used",
                                  "probabilities transposed", "probabilities scaled", "second operand"])
def test_what_is_something_else_stays(name):
    m, outputs = declined(name)
    compare(m, *outputs, fused=0, every_subset=False)


def test_a_stopped_gradient_stays_stopped():
    """StopGradient moves no entry either, but is not looked through."""
    for which in range(3):
        m = Model()
        operands = [m.random(2, 3, 5, 4) for _ in range(3)]
        stopped = m.name()
        m.nodes.append(helper.make_node("StopGradient", [operands[which]], [stopped], domain="ai.onnxtrain"))
        operands[which] = stopped
        y = plain_attention(m, *operands)
        model = onnx.load_model_from_string(m.bytes(y))
        model.opset_import.append(helper.make_opsetid("ai.onnxtrain", 1))
        _, grads, text = step(model.SerializeToString(), m.tensors, [1, 1, 1])
        assert "FusedAttention " in text
        assert [g is None or not g.any() for g in grads] == [i == which for i in range(3)]


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
