"""Attention as exporters write it becomes one node, forward and backward;
the numbers stay those of the nodes one by one.
"""

from __future__ import annotations

import itertools
import math

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


# How a mask of S x T is made, the diagonal of what it lets through, whether it is added, and whether that is causal.


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
