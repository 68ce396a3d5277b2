"""Whole programs on a device against the CPU: an MLP and a transformer with dropout, forward and backward, faults and
probes.

    python tests/cuda/programs.py PLUGIN DEVICE [part/parts | NAME,... | -TEXT,...]

With -TEXT, programs whose names have one of the texts are left out. Prints what checks.py says.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compare
import conv_graph
import devices
import draws
import images
import layouts
import onnx
import packed
import quantized
import replays
import rnn
import rotary
import rows
import sdpa
import smoke
import streamed
import streams
import torch
import values
import wrapped
from checks import Messages, every_nth, exported, run_checks
from compare import operators, place
from onnx import helper
from replays import untimed
from torch import nn

from onnxtrain import _C

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cpu"
PLUGIN = ""


def agree(*args: Any, **kwargs: Any) -> set[str]:
    return compare.agree(DEVICE, *args, **kwargs)


def mlp() -> set[str]:
    torch.manual_seed(0)
    return agree(*exported(nn.Sequential(nn.Linear(20, 33), nn.GELU(), nn.Linear(33, 5)), (torch.randn(8, 20),)))


def mlp_halves() -> set[str]:
    used: set[str] = set()
    for dtype in (torch.float16, torch.bfloat16):
        model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 18]>
            g (TYPE[8, 20] x, TYPE[20, 12] w, TYPE[12] b) => (TYPE[8, 12] z) { y = Gemm(x, w, b) t = Tanh(y) s = Sigmoid(t) z = Softmax(s) }
            '''.replace("TYPE", {torch.float16: "float16", torch.bfloat16: "bfloat16"}[dtype]))
        torch.manual_seed(0)
        used |= agree(model.SerializeToString(),
                      [t.to(dtype) for t in (torch.randn(8, 20), torch.randn(20, 12), torch.randn(12))], 3e-2)
    return used


UNALIGNED = """<ir_version: 10, opset_import: ["" : 20]>
    g (TYPE[3, 5, 7] x, TYPE[7, 9] w, TYPE[9] b, TYPE[3, 9, 4] v, TYPE[2, 1, 5, 7] p, TYPE[1, 3, 7, 4] q, TYPE[5, 7] r,
       TYPE[5, 9] c, TYPE[2, 3, 6, 5] i, TYPE[4, 3, 3, 3] k) => (z, h, s, o) {
        a = MatMul(x, w)  y = Add(a, b)  z = MatMul(y, v)
        h = MatMul(p, q)  s = Gemm <alpha = 0.5, beta = 0.25> (r, w, c)  o = Conv(i, k) }"""


def unaligned() -> set[str]:
    """Products and a convolution whose operands begin anywhere, of rows that have no size that libraries like."""
    used: set[str] = set()
    for dtype, name, tol in ((torch.float32, "float", 2e-5), (torch.float16, "float16", 1e-2),
                             (torch.bfloat16, "bfloat16", 6e-2), (torch.float64, "double", 1e-12)):
        model = onnx.parser.parse_model(UNALIGNED.replace("TYPE", name))
        torch.manual_seed(0)
        tensors = [torch.randn([d.dim_value for d in value.type.tensor_type.shape.dim]).to(dtype) / 2
                   for value in model.graph.input]
        for offset in (1, 0, 2, 8):
            used |= agree(model.SerializeToString(), tensors, tol, offset=offset)
    return used


def vision() -> set[str]:
    return images.vision(DEVICE)


def vision_in_planes() -> set[str]:
    return images.vision_in_planes(DEVICE)


def norms_of_images() -> set[str]:
    return images.norms_of_images(DEVICE) | images.norms_of_groups(DEVICE)


def channels_last() -> set[str]:
    """A convolution in 16 bits, by cuDNN's graphs where the device has them; tests/cuda/conv_graph.py has the cases."""
    used = set()
    for relu in (False, True):
        case = conv_graph.Case(torch.bfloat16, (2, 4, 7, 9), 6, (3, 3), (1, 2), (1, 1, 1, 1), bias=True, relu=relu)
        session, tensors = _C.Session(conv_graph.model_of(case), 16, DEVICE), conv_graph.operands(case)
        begin = len(MESSAGES.text)
        got = conv_graph.step(session, case, [t.to(place(DEVICE)) for t in tensors])
        assert "cuDNN" not in MESSAGES.text[begin:], MESSAGES.text[begin:]
        conv_graph.agree(case, got, conv_graph.eager(case, tensors))
        used |= {f"{op}:{kernel}" for op, kernel in conv_graph.kernels(session)}
    return used


def by_rule() -> set[str]:
    """Libraries' algorithms that are not measured: the first one that the library takes at a call."""
    times = getattr(ctypes.CDLL(PLUGIN), "ont_emulate_times", lambda: 0) if PLUGIN else lambda: 0  # taken so far
    _C.set_deterministic(True)
    try:
        before = times()
        used = unaligned() | vision()
        assert times() == before, "a kernel is measured"
        return used
    finally:
        _C.set_deterministic(False)


def transformer() -> set[str]:
    torch.manual_seed(0)
    model, data = smoke.language(0.2)
    return agree(*exported(model, (data()[0],)))


class Loss(nn.Module):
    """Scores of an embedding's sum and their cross-entropy, one label ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.table(tokens).tanh()), labels, ignore_index=7)


LINEAR = """<ir_version: 10, opset_import: ["" : 20]> g (TYPE[2, 4, 12] x, TYPE[12, 16] w, TYPE[16] b, TYPE[16, 12] v) => (TYPE[2, 4, 12] z) {
    p = MatMul(x, w)
    y = Add(p, b)
    h = Gelu <approximate = "FORM"> (y)
    z = MatMul(h, v)
}"""


def gelu_epilogues() -> set[str]:
    """A linear layer with GELU: forward with what the gradient reads, without it, and the gradient with the bias'. The
    other form
    of GELU and rows that the library does not take stay apart."""
    used: set[str] = set()
    for dtype, name, tol in ((torch.float32, "float", 2e-5), (torch.float16, "float16", 4e-3),
                             (torch.bfloat16, "bfloat16", 3e-2)):
        torch.manual_seed(0)
        tensors = [t.to(dtype) for t in (torch.randn(2, 4, 12), torch.randn(12, 16) / 3, torch.randn(16),
                                         torch.randn(16, 12) / 4)]
        text = LINEAR.replace("TYPE", name)
        names = agree(onnx.parser.parse_model(text.replace("FORM", "tanh")).SerializeToString(), tensors, tol)
        assert {"GeluMatMul:cuda_gelu_matmul", "GeluMatMulGrad:cuda_gelu_matmul"} <= names, names
        assert not any(n.startswith(("Gelu:", "GeluGrad:", "Add:")) for n in names), names
        used |= names
        plain = agree(onnx.parser.parse_model(text.replace("FORM", "none")).SerializeToString(), tensors, tol)
        odd = [t[..., :13] if t.shape[-1] == 16 else t[:13] if t.shape[0] == 16 else t for t in tensors]
        odd_text = text.replace("FORM", "tanh").replace("16]", "13]").replace("[16,", "[13,")
        plain |= agree(onnx.parser.parse_model(odd_text).SerializeToString(), [t.contiguous() for t in odd], tol)
        assert not any(n.startswith("GeluMatMul") for n in plain), plain
        model = onnx.parser.parse_model(text.replace("FORM", "tanh")).SerializeToString()
        both = [_C.Session(model, 16, device) for device in ("cpu", DEVICE)]
        (want,), (got,) = (s.forward([t.to(place(d)) for t in tensors], bytes(4))[0]
                           for s, d in zip(both, ("cpu", DEVICE), strict=True))
        assert torch.allclose(want.float(), got.cpu().float(), atol=tol * 3, rtol=tol)
    return used


def slow_epilogues() -> set[str]:
    """GELU is computed behind the product where its epilogue is slower; where kernels are chosen by rule, nothing is
    measured. Each product has a shape of its own, since choices are kept.
    """
    if DEVICE.startswith("cuda"):  # which says itself what is slow
        return set()
    library, used = ctypes.CDLL(PLUGIN), set()
    library.ont_emulate_launches.restype = ctypes.c_long
    for dtype, name, tol in ((torch.float32, "float", 2e-5), (torch.bfloat16, "bfloat16", 3e-2)):
        counts = []  # of kernels that are launched in a step
        for wide, slow, by_rule in ((24, True, False), (32, False, False), (40, True, True)):
            torch.manual_seed(0)
            tensors = [t.to(dtype) for t in (torch.randn(2, 4, 12), torch.randn(12, wide) / 3, torch.randn(wide),
                                             torch.randn(wide, 12) / 4)]
            text = LINEAR.replace("TYPE", name).replace("FORM", "tanh").replace("16]", f"{wide}]")
            model = onnx.parser.parse_model(text.replace("[16,", f"[{wide},")).SerializeToString()
            library.ont_emulate_set_slow_epilogues(slow)
            _C.set_deterministic(by_rule)
            try:
                used |= agree(model, tensors, tol)
                before = library.ont_emulate_launches(b"elementwise_kernel")
                used |= agree(model, tensors, tol)
                counts.append(library.ont_emulate_launches(b"elementwise_kernel") - before)
                _C.Session(model, 16, DEVICE).forward([t.to(place(DEVICE)) for t in tensors], bytes(4))
            finally:
                _C.set_deterministic(False)
                library.ont_emulate_set_slow_epilogues(-1)
        assert counts[0] == counts[1] + 2 == counts[2] + 2, counts
    return used


def attention() -> set[str]:
    """In 16 bits, by cuDNN where the device has it; tests/cuda/sdpa.py has the cases."""
    case = sdpa.Case(torch.bfloat16, 24, 24, size=32, v_size=32)
    session = _C.Session(sdpa.model_of(case, sdpa.operands(case)), 16, DEVICE)
    tensors = [t.to(place(DEVICE)) for t in sdpa.operands(case)]
    sdpa.agree(case, sdpa.step(session, case, tensors), sdpa.eager(case, sdpa.operands(case)))
    return sdpa.kernels(session)


def loss() -> set[str]:
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, 40, (600,)), torch.randint(0, 40, (600,))
    return agree(*exported(Loss(), (tokens, labels)))


HALF_LOSS = """<ir_version: 10, opset_import: ["" : 20]>
g (TYPE[r, c] x, int64[r] labels, float[c] w) => (OUTPUTS) {
    wide = Cast <to = 1> (x)
    nan = IsNaN(wide)
    y = SoftmaxCrossEntropyLoss <ignore_index = -1, reduction = "sum"> (wide, labels, w)
}"""


def loss_of_halves() -> set[str]:
    """16-bit scores are read as they are, at any alignment, and their gradient is rounded once. Where another node
    reads the float32 copy, the loss reads it too.
    """
    used: set[str] = set()
    for dtype, name, ulp in ((torch.float16, "float16", 2**-11), (torch.bfloat16, "bfloat16", 2**-8)):
        for classes, offset, outs in ((33, 0, "float y"), (2501, 0, "float y"), (2501, 1, "float y"),
                                      (2048, 8, "float y"), (1301, 0, "float y, bool[r, c] nan")):
            text = HALF_LOSS.replace("TYPE", name).replace("OUTPUTS", outs)
            torch.manual_seed(classes)
            flat = torch.randn(5 * classes + offset).mul(4).to(dtype)
            x = flat[offset:].view(5, classes)
            x[1, :classes // 2], x[2, 7:] = -torch.inf, -torch.inf
            labels, w = torch.tensor([classes - 1, classes - 2, 3, -1, 0]), torch.rand(classes) + 0.1
            tensors = [flat.to(place(DEVICE))[offset:].view(5, classes), labels.to(place(DEVICE)), w.to(place(DEVICE))]
            session = _C.Session(onnx.parser.parse_model(text).SerializeToString(), 16, DEVICE)
            outputs, run = session.forward(tensors, b"\1\0\0")
            saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
            got = run.backward(saved, [torch.tensor(0.75).to(place(DEVICE)), None][:len(outputs)])[0].cpu()
            wide = x.double().requires_grad_()
            want = nn.functional.cross_entropy(wide, labels, w.double(), ignore_index=-1, reduction="sum")
            want.backward(torch.tensor(0.75).double())
            assert abs(outputs[0].item() / want.item() - 1) < 2e-6, (outputs[0], want)
            assert got.dtype == dtype and (got[3] == 0).all()
            far = (got.double() - wide.grad).abs() - 1.01 * ulp * wide.grad.abs()
            assert far.max() < 1e-7, (dtype, classes, far.max())
            kernels = {f"{operator}:{kernel}" for operator, kernel in operators(session)}
            assert "SoftmaxCrossEntropyGrad <to = " in session.text("program")
            assert ("nan" in outs) == any("Cast" in kernel for kernel in kernels), kernels
            used |= kernels
    return used


def sums() -> set[str]:
    return rows.sums(DEVICE)


def heads() -> set[str]:
    return rows.heads(DEVICE) | rows.gates(DEVICE)


def norms() -> set[str]:
    return rows.norms(DEVICE)


def streamed_losses() -> set[str]:
    return streamed.losses(DEVICE)


def graph_of_pieces() -> set[str]:
    return untimed(lambda: streamed.replayed(DEVICE))


def hot_rows() -> set[str]:
    """The gradient of a table of which one row is read nearly always. A running sum of float32 would be wrong by more
    than the tolerance; sums of pieces, whose sums are added, are not.
    """
    used: set[str] = set()
    for dtype, axis, count, columns in ((torch.float32, 0, 6000, 3), (torch.float32, 1, 45, 10), (torch.float64, 0, 64, 1),
                                        (torch.float16, 0, 33, 48), (torch.bfloat16, 1, 2000, 6)):
        torch.manual_seed(0)
        shape = [7, columns] if axis == 0 else [2, 7, columns]
        x, index = torch.randn(shape).to(dtype), torch.full((count,), 4)
        for at, row in ((1, 0), (17, 6), (31, 5), (count - 1, 5), (count // 2, 2)):
            index[at] = row
        node = helper.make_node("Gather", ["x", "i"], ["y"], axis=axis)
        code = {torch.float32: 1, torch.float64: 11, torch.float16: 10, torch.bfloat16: 16}[dtype]
        inputs = [helper.make_tensor_value_info("x", code, x.shape), helper.make_tensor_value_info("i", 7, index.shape)]
        graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        session = _C.Session(model.SerializeToString(), 16, DEVICE)
        tensors = [x.to(place(DEVICE)), index.to(place(DEVICE))]
        (y,), run = session.forward(tensors, b"\1\0")
        assert torch.equal(y.cpu(), x.index_select(axis, index)), (dtype, axis)
        dy = (torch.rand(y.shape) + 0.5).to(dtype)
        got = run.backward([tensors[i] for i in run.saved_inputs], [dy.to(y.device)])[0].cpu()
        want = torch.zeros(x.shape, dtype=torch.float64)
        want.index_add_(axis, index, dy.double())
        tol = {torch.float32: 3e-7, torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        worst = ((got.double() - want).abs() / want.abs().clamp(min=1)).max().item()
        assert worst <= tol, (dtype, axis, count, worst)
        used |= {f"{operator}:{kernel}" for operator, kernel in operators(session)}
    return used


def copies() -> set[str]:
    return layouts.copies(DEVICE)


def indices() -> set[str]:
    return layouts.indices(DEVICE)


ROTARY = """<ir_version: 10, opset_import: ["" : 20]> g (TYPE[2, 5, 3, N] x, TYPE[5, 1, N] c, TYPE[1, N] s) => (y) {
    a, b = Split <axis = 3, num_outputs = 2> (x)  n = Neg(b)  t = Concat <axis = 3> (n, a)
    p = Mul(x, c)  q = Mul(t, s)  y = Add(p, q) }"""


def rotations() -> set[str]:
    """Rotary embeddings and their gradients, with halves that units of 16 bytes fit and do not fit."""
    used: set[str] = set()
    for n in (16, 6):
        for name, dtype, tol in (("float", torch.float32, 2e-6), ("double", torch.float64, 1e-14)):
            torch.manual_seed(0)
            tensors = [torch.randn(shape, dtype=dtype) for shape in ((2, 5, 3, n), (5, 1, n), (1, n))]
            model = onnx.parser.parse_model(ROTARY.replace("TYPE", name).replace("N]", f"{n}]")).SerializeToString()
            used |= agree(model, tensors, tol)
            x_alone = agree(model, tensors, tol, mask=b"\1\0\0")
            assert x_alone == {"Rotate:cuda_rotate"}, x_alone
    return used | rotary.rotations(DEVICE) | rotary.attention(DEVICE)


def fault() -> set[str]:
    """An index out of range is an IndexError that names operator, value and position; the session goes on."""
    node = helper.make_node("Gather", ["x", "i"], ["y"], name="lookup")
    graph = helper.make_graph([node], "g",
                              [helper.make_tensor_value_info("x", 1, (5, 3)),
                               helper.make_tensor_value_info("i", 7, (4,))],
                              [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
    session, x = _C.Session(model, 16, DEVICE), torch.randn(5, 3, device=place(DEVICE))
    try:
        session.forward([x, torch.tensor([0, 1, 9, 2], device=x.device)], b"\0\0")
        if x.is_cuda:  # found when the device is looked at next
            torch.cuda.synchronize()
            session.forward([x, torch.tensor([0, 1, 2, 2], device=x.device)], b"\0\0")
    except IndexError as error:
        assert ("Gather 'lookup'" in str(error) and "index 9 at position 2" in str(error)
                and "5 entries" in str(error)), str(error)
    else:
        raise AssertionError("an index out of range passed")
    (y,), _ = session.forward([x, torch.tensor([0, 1, -1, 2], device=x.device)], b"\0\0")
    assert torch.equal(y, x[[0, 1, 4, 2]])
    return set()


# Inputs, a node, its first input, an operand that is not valid and one that is, and what is said of the first.
FAULTS = (
    ("float[4, 3, 2] x, int64[3] n", "ReverseSequence (x, n)", [torch.tensor([4, 9, 2])], [torch.tensor([4, 0, 2])],
     IndexError, "length 9 of sample 1 is outside 0 to 4"),
    ("float[1, 1, 2, 2] x, int64[1, 1, 2, 2] i", "MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (x, i)",
     [torch.tensor([[[[0, 2], [16, 3]]]])], [torch.tensor([[[[0, 2], [15, 3]]]])], IndexError,
     "index 16 at position 2"),
    ("float[2, 2, 5, 5] x, float[2, 4] r, int64[2] b", "RoiAlign (x, r, b)", [torch.ones(2, 4), torch.tensor([1, 2])],
     [torch.ones(2, 4), torch.tensor([1, 0])], IndexError, "index 2 at position 1"),
    ("float[2, 2, 5, 5] x, float[2, 4] r, int64[2] b", "RoiAlign (x, r, b)",
     [torch.tensor([[0.0, 0, 2, 2], [0, float("nan"), 2, 2]]), torch.tensor([1, 1])],
     [torch.ones(2, 4), torch.tensor([1, 0])], ValueError, "region 1 has an edge that is not less than 1e9"),
    ("float[2, 2, 5, 5] x, float[1, 4] r, int64[1] b", "RoiAlign (x, r, b)",
     [torch.tensor([[0.0, 0, 1e8, 2]]), torch.tensor([1])], [torch.ones(1, 4), torch.tensor([1])], ValueError,
     "or bins of more than 4096 cells"),
    ("float[2, 2, 5, 5] x, float[1, 5] r", "MaxRoiPool <pooled_shape = [1, 1]> (x, r)",
     [torch.tensor([[5.0, 0, 0, 2, 2]])], [torch.tensor([[1.0, 0, 0, 2, 2]])], IndexError, "index 5 at position 0"),
)


def faults() -> set[str]:
    """Operands that are not valid raise the exceptions of the CPU, with operator and position."""
    for inputs, body, wrong, valid, kind, said in FAULTS:
        sessions = [rows.session_of(f"g ({inputs}) => (y) {{ y = {body} }}", device) for device in (DEVICE, "cpu")]
        dims = re.search(r"\[([\d, ]+)\] x", inputs)
        x = torch.randn([int(dim) for dim in dims[1].split(",")])
        none = bytes(1 + len(valid))
        try:
            sessions[0].forward([t.to(place(DEVICE)) for t in (x, *wrong)], none)
            if place(DEVICE) != "cpu":  # found when the device is looked at next
                torch.cuda.synchronize()
                sessions[0].forward([t.to(place(DEVICE)) for t in (x, *valid)], none)
        except kind as error:
            assert said in str(error) and body.split(" ")[0] in str(error), str(error)
        else:
            raise AssertionError(f"{body}: passed")
        try:
            sessions[1].forward([x, *wrong], none)
        except kind:
            pass
        else:
            raise AssertionError(f"{body}: the CPU takes it")
        (y,), (want,) = (session.forward([t.to(at) for t in (x, *valid)], none)[0]
                         for session, at in zip(sessions, (place(DEVICE), "cpu")))
        torch.testing.assert_close(y.cpu(), want)
    return set()


def rare() -> set[str]:
    """What the operators' own cases fold away or do not have: a Range and a constant that are too long to be folded,
    and a cast of a kind that no group has.
    """
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[2, 3] x, double[1] like) => (double[2, 3] y, float[300000] r, int32[300000] c)
              <float first = {1.5}, float last = {300001.5}, float by = {1.0}, int64[1] n = {300000}>
              { y = CastLike(x, like)  r = Range(first, last, by)  c = ConstantOfShape <value = int32[1] {-7}> (n) }"""
    model = onnx.parser.parse_model(text).SerializeToString()
    tensors = [torch.randn(2, 3), torch.randn(1, dtype=torch.float64)]
    got, want = (_C.Session(model, 16, device) for device in (DEVICE, "cpu"))
    ours, _ = got.forward([t.to(place(DEVICE)) for t in tensors], b"\0\0")
    for a, b in zip(ours, want.forward(tensors, b"\0\0")[0], strict=True):
        assert torch.equal(a.cpu(), b)
    return {f"{operator}:{kernel}" for operator, kernel in operators(got)}


def strided() -> set[str]:
    """Strided inputs are made row-major on the device."""
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 18]> g (float[4, 6] x) => (float[4, 6] y) { y '
                                    '= Exp(x) }')
    session, x = _C.Session(model.SerializeToString(), 16, DEVICE), torch.randn(6, 4, device=place(DEVICE)).t()
    (y,), _ = session.forward([x], b"\0")
    assert torch.allclose(y, x.exp(), rtol=1e-6)
    return set()


def ortmodule() -> set[str]:
    return wrapped.ortmodule(DEVICE)


def graphs() -> set[str]:
    return replays.graphs(DEVICE)


def graph_shapes() -> set[str]:
    return replays.graph_shapes(DEVICE)


def graph_freed() -> set[str]:
    return replays.graph_freed(DEVICE)


def graph_of_the_caller() -> set[str]:
    return replays.graph_of_the_caller(DEVICE, PLUGIN)


def settings() -> set[str]:
    return replays.settings(DEVICE)


GROUPS = {  # text of a graph: broadcasts, vectors of four, odd counts, dropout, casts, several results
    "vector": "g (float[6, 8] x, float[6, 8] y) => (z, t) { a = Mul(x, y) t = Tanh(a) z = Gelu(t) }",
    "odd": "g (float[5, 7] x, float[5, 7] y) => (float[5, 7] z) { a = Sub(x, y) b = Exp(a) z = Sigmoid(b) }",
    "broadcast": "g (float[5, 1, 7] x, float[3, 1] y) => (float[5, 3, 7] z) { a = Add(x, y) b = LeakyRelu <alpha = "
                 "0.2> (a) z = Softplus(b) }",
    "double": "g (double[6, 8] x, double[8] y) => (double[6, 8] z) { a = Div(x, y) b = Erf(a) z = Mul(b, x) }",
}


def groups() -> set[str]:
    used: set[str] = set()
    for text in GROUPS.values():
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
        torch.manual_seed(0)
        dtypes = {1: torch.float32, 11: torch.float64}
        tensors = [torch.randn([d.dim_value for d in i.type.tensor_type.shape.dim],
                               dtype=dtypes[i.type.tensor_type.elem_type])
                   for i in model.graph.input]
        used |= agree(model.SerializeToString(), tensors)
    return used


STEPS = """<ir_version: 10, opset_import: ["" : 20]>
    g (bool[3, 8] m, bool[3, 8] k, float[3, 8] x, int64[3, 8] i, bfloat16[3, 8] h, int32[3, 8] n, float16[8] r, double[3, 1] d)
        => (a, b, c, e, f, o, p, q, s, t, u, v, w, l, aa, bb) {
    a = And(m, k)  b = Xor(m, k)  c = Not(m)  e = IsNaN(x)  f = Cast <to = 1> (m)  o = Cast <to = 9> (h)
    low = Constant <value_float = -0.5> ()  p = Clip(x, low)  q = Cast <to = 6> (h)  s = Add(h, h)
    y = Cast <to = 1> (i)  t = Mul(y, low)  u = Cast <to = 16> (d)  v = Where(m, n, n)
    z = Cast <to = 1> (r)  w = Mul(x, z)  l = IsInf <detect_negative = 0> (x)  aa = BitwiseNot(n)  bb = BitwiseXor(aa, n) }"""


def steps() -> set[str]:
    """Steps on masks, integers and 16-bit floats."""
    torch.manual_seed(0)
    x = torch.randn(3, 8) * 4
    x[1, 2:5] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    tensors = [torch.rand(3, 8) > 0.5, torch.rand(3, 8) > 0.5, x, torch.randint(-9, 9, (3, 8)),
               torch.tensor([0.0, 1.5] * 12).reshape(3, 8).bfloat16(), torch.arange(24, dtype=torch.int32).reshape(3, 8),
               torch.randn(8).half(), torch.randn(3, 1, dtype=torch.float64)]
    model = onnx.parser.parse_model(STEPS).SerializeToString()
    both = [_C.Session(model, 16, device) for device in ("cpu", DEVICE)]
    want, got = (s.forward([t.to(place(d)) for t in tensors], bytes(8), 3)[0]
                 for s, d in zip(both, ("cpu", DEVICE), strict=True))
    for k, (a, b) in enumerate(zip(want, got, strict=True)):
        assert torch.equal(a.nan_to_num(7), b.cpu().nan_to_num(7)), (k, a, b)
    return {f"{operator}:{kernel}" for operator, kernel in operators(both[1])}


DROPS = """<ir_version: 10, opset_import: ["" : 20]> g (TYPE[4, 6, 8] x, TYPE[8] b) => (z, m) {
    ratio = Constant <value_float = 0.3> ()  yes = Constant <value = bool {1}> ()
    a = Add(x, b)  y, m = Dropout(a, ratio, yes)  z = Tanh(y) }"""


def drops() -> set[str]:
    """Dropout in a group and with its mask: the same elements as on the CPU are dropped."""
    used: set[str] = set()
    for name, dtype, tol in (("float", torch.float32, 2e-5), ("bfloat16", torch.bfloat16, 3e-2)):
        torch.manual_seed(0)
        tensors = [torch.rand(4, 6, 8).to(dtype) + 0.5, torch.rand(8).to(dtype)]
        used |= agree(onnx.parser.parse_model(DROPS.replace("TYPE", name)).SerializeToString(), tensors, tol)
    return used


def generated() -> set[str]:
    """Elementwise steps and groups compiled from generated source, against the CPU; by NVRTC on a GPU."""
    if DEVICE.startswith("cuda"):
        return groups() | mlp() | steps() | drops()
    os.environ["ONT_EMULATE_JIT"] = "false %s %s"  # a compiler that refuses: said, and interpreted
    mlp_halves()
    refused = MESSAGES.count("interpreted")
    assert refused
    with compiler() as compiled:
        used = groups() | mlp() | drops()
        before = len(compiled.read_text(encoding="utf-8").split())
        used |= steps()
        grown = len(compiled.read_text(encoding="utf-8").split()) - before
        assert grown == 18, grown  # a kernel for each step or group
        assert MESSAGES.count("interpreted") == refused, MESSAGES.text
    return used


@contextlib.contextmanager
def compiler() -> Iterator[Path]:
    """Generated kernels are compiled on the emulated device, too; the file has a line for each of them."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("-std=c++17 -O1 -fPIC -DONT_EMULATE -ffp-contract=off -fsanitize=alignment -fvisibility=hidden "
                   f"-I{ROOT}/cuda -I{ROOT}/csrc")
        emulation, compiled = f"{folder}/emulate.o", Path(folder, "compiled")
        subprocess.run(f"c++ {options} -c -o {emulation} -x c++ {ROOT}/cuda/emulate/emulate.cc", shell=True, check=True)
        os.environ["ONT_EMULATE_JIT"] = f"echo . >> {compiled} && c++ {options} -shared -o %s %s {emulation} -lpthread"
        try:
            yield compiled
        finally:
            del os.environ["ONT_EMULATE_JIT"]


def graph_variants() -> set[str]:
    """A group whose input begins anywhere is interpreted. When the input moves, it gets a static buffer, so that the
    generated kernel is launched for the first time while the graph is captured again.
    """
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[6, 8] x) => (float[6, 8] y) { a = Tanh(x) y = Exp(a) }'
    flat = [torch.zeros(64, device=place(DEVICE)) for _ in range(2)]

    def check() -> None:
        session = _C.Session(onnx.parser.parse_model(text).SerializeToString(), 16, DEVICE)
        for k in range(12):
            x = flat[k > 5][1:49].view(6, 8).normal_()
            (y,), _ = session.forward([x], b"\0")
            assert torch.allclose(y.cpu(), x.cpu().tanh().exp(), rtol=1e-5), k
            if k == 4:
                assert session.graphs()[0][1:] == (1, 3, ""), session.graphs()
        assert session.graphs()[0][1:] == (2, 9, ""), session.graphs()

    with contextlib.nullcontext() if DEVICE.startswith("cuda") else compiler():
        return untimed(check)


def valued() -> set[str]:
    values.refused(DEVICE, place(DEVICE))
    return values.nonzero(DEVICE, place(DEVICE)) | agree(*values.recurrent()) | values.selected(DEVICE, place(DEVICE))


def recurrent() -> set[str]:
    """Layers by cuDNN where the device has it; tests/cuda/rnn.py has the cases."""
    used: set[str] = set()
    for case in (rnn.Case("LSTM", 5, 3, 4, 6, both=True), rnn.Case("GRU", 6, 3, 4, 5, both=True)):
        session, begin = _C.Session(rnn.model_of(case), 16, DEVICE), len(MESSAGES.text)
        got = rnn.step(session, case, [t.to(place(DEVICE)) for t in rnn.operands(case)])
        assert "differ" not in MESSAGES.text[begin:], MESSAGES.text[begin:]
        rnn.agree(case, got)
        used |= {f"{op}:{kernel}" for _, op, kernel, *_ in session.timeline()}
    return used


def two_devices() -> set[str]:
    return devices.interleaved(PLUGIN, "mlp")


def two_devices_of_layers() -> set[str]:
    return devices.interleaved(PLUGIN, "lstm")


def streams_in_turns() -> set[str]:
    return streams.in_turns(PLUGIN)


def two_ranks() -> set[str]:
    import peers  # and with it the trainer's tests

    return peers.two_ranks(PLUGIN)


def quantized_steps() -> set[str]:
    return quantized.quantized(DEVICE)


def unused_rows() -> set[str]:
    return packed.rows(DEVICE, place(DEVICE))


def padded_batches() -> set[str]:
    packed.memory(DEVICE, place(DEVICE))
    return packed.modules(DEVICE, place(DEVICE))


def random_numbers() -> set[str]:
    draws.keys(DEVICE)
    return draws.numbers(DEVICE) | draws.samples(DEVICE)


def random_graphs() -> set[str]:
    return untimed(lambda: draws.replays(DEVICE))


MESSAGES = Messages()

PROGRAMS: list[Callable[[], set[str]]] = [
    mlp, mlp_halves, unaligned, channels_last, by_rule, gelu_epilogues, slow_epilogues, transformer, attention, loss,
    loss_of_halves, heads, sums, norms, hot_rows, copies, indices, rotations, fault, faults, strided, rare, graphs, graph_shapes,
    graph_freed, graph_of_the_caller, settings, vision, vision_in_planes, norms_of_images, valued, recurrent, steps,
    drops, generated, quantized_steps, unused_rows, random_numbers, random_graphs, graph_variants, streamed_losses,
    graph_of_pieces, ortmodule, *([padded_batches] if importlib.util.find_spec("transformers") else [])]


def main(plugin: str, device: str, which: str = "0/1") -> None:
    global DEVICE, PLUGIN
    PLUGIN = plugin
    logging.getLogger("onnxtrain").addHandler(MESSAGES)
    _C.open_plugin(plugin or None)
    _C.set_timing(True)
    DEVICE = device
    if which.startswith("-"):
        left_out = which[1:].split(",")
        chosen = [program for program in PROGRAMS if not any(name in program.__name__ for name in left_out)]
    else:
        chosen = every_nth(PROGRAMS, which) if "/" in which else [globals()[name] for name in which.split(",")]
    run_checks(chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
