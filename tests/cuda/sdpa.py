"""Attention by cuDNN's graphs on a device: against eager in float64 and the CPU's kernels, each direction by cuDNN or by
the own kernels, in recorded graphs, and with faults planted in the emulated library.

    python tests/cuda/sdpa.py PLUGIN DEVICE [part/parts | faults]

Prints what checks.py says. With "faults" only those are planted, which needs the emulation.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import test_fuse_attention as graphs
import torch
from checks import every_nth, replayed, run_checks

from onnxtrain import _C

PLUGIN, DEVICE = "", "cpu"
NAMES = ("y", "dq", "dk", "dv")
FORWARD, BACKWARD = "FusedAttention:cuda_attention_dnn", "FusedAttentionGrad:cuda_attention_grad_dnn"


class Case(NamedTuple):
    dtype: torch.dtype
    rows: int
    columns: int
    heads: int = 2
    kv: int = 2
    size: int = 64
    v_size: int = 64
    causal: bool = True
    swapped: bool = False  # operands are (batch, length, heads, size)
    more: str = ""


CASES = [*[Case(dtype, 40, 40, size=size, v_size=size) for dtype in (torch.float16, torch.bfloat16) for size in (64, 128)],
         Case(torch.bfloat16, 33, 75, causal=False), Case(torch.float16, 75, 33, size=80, v_size=96, causal=False),
         Case(torch.bfloat16, 21, 53, size=8, v_size=24), Case(torch.float16, 53, 21, 1, 1, 16, 16),
         Case(torch.bfloat16, 37, 37, 4, 2, 128, 128), Case(torch.float16, 19, 67, 4, 1, 32, 16, causal=False),
         Case(torch.bfloat16, 31, 31, 4, 2, 32, 32, more="repeated"),
         Case(torch.bfloat16, 35, 35, 4, 2, 64, 32, swapped=True), Case(torch.float16, 47, 29, 3, 3, swapped=True)]
# Those that cuDNN does not compute: the own kernels do.
OTHERS = [Case(torch.float16, 20, 30, more="bias"), Case(torch.bfloat16, 20, 30, causal=True, more="offset"),
          Case(torch.bfloat16, 20, 30, causal=False, more="drop"), Case(torch.float32, 20, 20)]


class Messages(logging.Handler):
    """Warnings of the core."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


MESSAGES = Messages()


def operands(case: Case) -> list[torch.Tensor]:
    torch.manual_seed(case.rows * 1000 + case.columns)
    shapes = ((case.heads, case.rows, case.size), (case.kv, case.columns, case.size), (case.kv, case.columns, case.v_size))
    return [torch.randn(2, *((n, h, d) if case.swapped else (h, n, d))).to(case.dtype) for h, n, d in shapes]


def visible(case: Case) -> torch.Tensor:
    offset = case.columns - case.rows if case.more == "offset" else 0
    return torch.ones(case.rows, case.columns, dtype=torch.bool).tril(offset)


def model_of(case: Case, tensors: list[torch.Tensor]) -> bytes:
    """Attention written out; the pass fuses it."""
    m = graphs.Model(case.dtype)
    q, k, v = (m.input(t) for t in tensors)
    if case.swapped:
        q, k, v = (m("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, k, v))
    if case.kv != case.heads:
        k, v = (m("Reshape", m("Expand", m("Unsqueeze", t, m.ints(2)),
                               m.ints(2, case.kv, case.heads // case.kv, case.columns, d)),
                  m.ints(2, case.heads, case.columns, d)) for t, d in ((k, case.size), (v, case.v_size)))
    if case.more == "repeated":  # K is there once for each head of Q, V is not
        k = m("Add", k, k)
    to = {"to": graphs.TYPES[case.dtype]}
    s = m("Mul", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])),
          m("Cast", m.constant(case.size**-0.5, torch.float32), **to))
    if case.causal:
        s = m("Where", m.constant(visible(case), torch.bool), s,
              m("Cast", m.constant(float("-inf"), torch.float32), **to))
    if case.more == "bias":
        s = m("Add", s, m("Cast", m.constant(torch.ones(case.rows, case.columns), torch.float32), **to))
    p = m("Softmax", s, axis=-1)
    if case.more == "drop":
        p = m("Dropout", p, m.constant(0.3, torch.float32), m.constant(True, torch.bool))
    y = m("Transpose", m("MatMul", p, v), perm=[0, 2, 1, 3])
    assert len(m.tensors) == 3
    return m.bytes(y)


@functools.cache
def output_gradient(case: Case) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(2, case.rows, case.heads, case.v_size, dtype=torch.float64).to(case.dtype)


def eager(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients in float64 of the same 16-bit operands."""
    wide = [t.double().requires_grad_() for t in tensors]
    q, k, v = (t.transpose(1, 2) if case.swapped else t for t in wide)
    if case.more == "repeated":
        k = k + k
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible(case) if case.causal else None,
                                                         enable_gqa=case.kv != case.heads).transpose(1, 2)
    y.backward(output_gradient(case).double())
    return [y.detach(), *(t.grad for t in wide)]


def step(session: _C.Session, case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs, run = session.forward(tensors, bytes([1, 1, 1]), 11)
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    return [outputs[0].clone(), *(g.clone() for g in run.backward(saved, [output_gradient(case).to(tensors[0].device)]))]


def kernels(session: _C.Session) -> set[str]:
    return {f"{op}:{kernel}" for _, op, kernel, *_ in session.timeline()}


def agree(case: Case, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    tol = 4e-2 if case.dtype == torch.bfloat16 else 6e-3
    for name, a, b in zip(NAMES, got, want, strict=True):
        error = (a.cpu().double() - b.double()).abs().max().item() / max(1.0, b.abs().max().item())
        assert error < tol, f"{case}: {name}: {error:.2e}"


def runs() -> int:
    """Graphs that the emulated library has computed; on a GPU nobody counts."""
    return 0 if DEVICE.startswith("cuda") else ctypes.CDLL(PLUGIN).ont_emulate_dnn_runs()


def on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to(DEVICE) if DEVICE.startswith("cuda") else t for t in tensors]


def is_exact() -> bool:
    """Which kernel runs is known: on a GPU the library may decline, or be slower."""
    return not DEVICE.startswith("cuda")


def cases() -> set[str]:
    """Both directions by cuDNN, then each with the other by the own kernels: their statistics are exchanged."""
    used: set[str] = set()
    for case in CASES:
        print(case, file=sys.stderr, flush=True)
        tensors = operands(case)
        want, model = eager(case, tensors), model_of(case, tensors)
        agree(case, step(_C.Session(model, 16, "cpu"), case, tensors), want)
        for off in ([], [FORWARD], [BACKWARD]):
            _C.disable_kernels(off)
            before, session = runs(), _C.Session(model, 16, DEVICE)
            agree(case, step(session, case, on_device(tensors)), want)
            used |= kernels(session)
            if is_exact():
                assert kernels(session) & {FORWARD, BACKWARD} == {FORWARD, BACKWARD} - set(off), kernels(session)
                assert runs() == before + 2 - len(off)
            assert not MESSAGES.lines, MESSAGES.lines
        _C.disable_kernels([])
    return used


def others() -> set[str]:
    for case in OTHERS:
        session = _C.Session(model_of(case, operands(case)), 16, DEVICE)
        agree(case, step(session, case, on_device(operands(case))),
              step(_C.Session(model_of(case, operands(case)), 16, "cpu"), case, operands(case)))
        assert not kernels(session) & {FORWARD, BACKWARD}, (case, kernels(session))
    return set()


def recorded() -> set[str]:
    """Calls that are replayed from a graph give what those before them gave, bit for bit."""
    case = Case(torch.bfloat16, 26, 26, 4, 2, 32, 32)
    session, tensors = _C.Session(model_of(case, operands(case)), 16, DEVICE), on_device(operands(case))
    before = runs()
    agree(case, replayed(session, lambda: step(session, case, tensors)), eager(case, operands(case)))
    assert not is_exact() or runs() == before + 16
    return set()


def unaligned() -> set[str]:
    """An address that is not a multiple of 16: the own kernels, for this call alone."""
    case = Case(torch.float16, 28, 28)
    tensors = operands(case)
    session, before = _C.Session(model_of(case, tensors), 16, DEVICE), runs()
    odd = [torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t) for t in tensors]
    for given, grown in ((odd, 0), (tensors, 2)):
        agree(case, step(session, case, on_device(given)), eager(case, tensors))
        assert not is_exact() or runs() == before + grown
    return set()


def versions() -> set[str]:
    """What a version of the library does not do, the own kernels do."""
    if not is_exact():
        return set()
    for i, (version, names) in enumerate((("91400", {FORWARD}), ("91000", {FORWARD}), ("90200", set()),
                                          ("92100", {FORWARD, BACKWARD}))):
        os.environ["ONT_EMULATE_DNN_VERSION"] = version
        case = Case(torch.bfloat16, 30 + i, 30 + i)
        session = _C.Session(model_of(case, operands(case)), 16, DEVICE)
        agree(case, step(session, case, operands(case)), eager(case, operands(case)))
        assert kernels(session) & {FORWARD, BACKWARD} == names, (version, kernels(session))
    del os.environ["ONT_EMULATE_DNN_VERSION"]
    return set()


def parts() -> set[str]:
    """A workspace above 512 MiB: the batch is computed in parts."""
    if not is_exact():
        return set()
    os.environ["ONT_EMULATE_DNN_WORK"] = str(300 << 20)
    case = Case(torch.bfloat16, 36, 36, 4, 2, 32, 32)
    before, session = runs(), _C.Session(model_of(case, operands(case)), 16, DEVICE)
    agree(case, step(session, case, operands(case)), eager(case, operands(case)))
    del os.environ["ONT_EMULATE_DNN_WORK"]
    assert runs() == before + 4 and not MESSAGES.lines, (runs() - before, MESSAGES.lines)
    return set()


def measured() -> set[str]:
    """The emulated library says that the own kernels are faster: they are used from the second call on. By rule cuDNN
    is, whatever was measured before, and nothing is timed.
    """
    if not is_exact():
        return set()
    os.environ["ONT_EMULATE_DNN_TIME"] = "1"
    case, other = (Case(torch.bfloat16, n, n, size=32, v_size=32) for n in (38, 39))
    try:
        for by_rule, made, counts in ((False, case, (4, 0)), (True, case, (2, 2)), (True, other, (2, 2))):
            _C.set_deterministic(by_rule)
            tensors = operands(made)
            session = _C.Session(model_of(made, tensors), 16, DEVICE)
            for grown in counts:
                before = runs()
                agree(made, step(session, made, tensors), eager(made, tensors))
                assert runs() == before + grown, (by_rule, made, runs() - before)
    finally:
        _C.set_deterministic(False)
        del os.environ["ONT_EMULATE_DNN_TIME"]
    return set()


# What is planted, and what the warning says of it.
FAULTS = {"stride": "differ", "uid": "differ", "scale": "differ", "select": "differ", "rows": "differ",
          "execute": "failed", "finalize": ""}


def faults() -> set[str]:
    """A graph that computes something else is noticed at its first run: the results are right, a warning says so, and
    the graph is not run again.
    """
    for i, (fault, message) in enumerate(FAULTS.items()):
        for dtype in (torch.float16, torch.bfloat16):
            os.environ["ONT_EMULATE_DNN_FAULT"] = fault
            case = Case(dtype, 60 + i, 60 + i, size=32, v_size=32)
            tensors = operands(case)
            session = _C.Session(model_of(case, tensors), 16, DEVICE)
            for call in range(3):
                before = runs()
                agree(case, step(session, case, tensors), eager(case, tensors))
                found = len([line for line in MESSAGES.lines if message and message in line])
                assert found == (2 if message and not call else 0), (fault, call, MESSAGES.lines)
                assert runs() == before + (2 if message == "differ" and not call else 0), (fault, call)
                MESSAGES.lines.clear()
            expected = {FORWARD, BACKWARD} if message else set()
            assert kernels(session) & {FORWARD, BACKWARD} == expected, (fault, kernels(session))
            del os.environ["ONT_EMULATE_DNN_FAULT"]
    return set()


CHECKS: list[Callable[[], set[str]]] = [cases, others, recorded, unaligned, versions, parts, measured]


def main(plugin: str, device: str, which: str = "0/1") -> None:
    global PLUGIN, DEVICE
    PLUGIN, DEVICE = plugin, device
    logging.getLogger("onnxtrain").addHandler(MESSAGES)
    _C.open_plugin(plugin or None)
    _C.set_timing(True)
    run_checks([faults] if which == "faults" else every_nth(CHECKS, which))


if __name__ == "__main__":
    main(*sys.argv[1:])
