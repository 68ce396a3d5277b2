"""Recurrent layers by cuDNN on a device: against torch's cells in float64, in recorded graphs, in inference, in models
under torch, and with faults planted in the emulated library.

    python tests/cuda/rnn.py PLUGIN DEVICE [part/parts | faults]

Prints what checks.py says. With "faults" only those are planted, which needs the emulation.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import onnx
import sdpa
import torch
from checks import every_nth, replayed, run_checks
from torch import nn

from onnxtrain import _C, _report
from onnxtrain.ortmodule import ORTModule, _runner

PLUGIN, DEVICE = "", "cpu"
LAYERS = {"cuda_rnn_dnn", "cuda_rnn_dnn_grad"}
STEPS = {"cuda_recurrent_steps", "cuda_recurrent_steps_grad"}
MESSAGES = sdpa.Messages()
# ONNX's order of gates from torch's: LSTM i, f, g, o to i, o, f, c; GRU r, z, n to z, r, h
ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}


class Case(NamedTuple):
    op: str
    steps: int
    batch: int
    size: int
    hidden: int
    both: bool = False
    bias: bool = True
    states: bool = True
    activation: str = "Tanh"
    dtype: torch.dtype = torch.float32
    outputs: str = "yhc"  # those whose gradients there are


WIDE, HALF, BRAIN = torch.float64, torch.float16, torch.bfloat16
KINDS = {torch.float32: "float", WIDE: "double", HALF: "float16", BRAIN: "bfloat16"}
TOLERANCES = {torch.float32: 2e-5, WIDE: 1e-11, HALF: 1e-2, BRAIN: 6e-2}
CASES = [Case("LSTM", 5, 3, 4, 6, both=True), Case("LSTM", 4, 2, 5, 5, dtype=WIDE), Case("LSTM", 1, 1, 1, 1),
         Case("LSTM", 11, 2, 3, 4, bias=False, states=False, outputs="y"), Case("LSTM", 3, 4, 7, 2, outputs="c"),
         Case("LSTM", 3, 2, 6, 6, both=True, states=False, outputs="h", dtype=WIDE),
         Case("GRU", 6, 3, 4, 5, both=True), Case("GRU", 9, 2, 3, 3, bias=False, dtype=WIDE),
         Case("GRU", 2, 5, 4, 4, states=False, outputs="y"), Case("GRU", 3, 2, 8, 3, both=True, outputs="h"),
         Case("RNN", 4, 3, 5, 4, both=True), Case("RNN", 7, 2, 3, 6, activation="Relu", dtype=WIDE),
         Case("RNN", 3, 2, 4, 4, both=True, bias=False, states=False, activation="Relu", outputs="y"),
         Case("LSTM", 5, 3, 4, 8, both=True, dtype=HALF), Case("LSTM", 4, 2, 6, 5, dtype=BRAIN),
         Case("GRU", 4, 2, 5, 6, both=True, dtype=BRAIN), Case("RNN", 4, 2, 5, 6, dtype=HALF)]


def layer_of(case: Case) -> nn.RNNBase:
    torch.manual_seed(case.steps * 100 + case.hidden)
    more = {"nonlinearity": case.activation.lower()} if case.op == "RNN" else {}
    return getattr(nn, case.op)(case.size, case.hidden, bias=case.bias, bidirectional=case.both, **more).double()


def rows(case: Case, t: torch.Tensor) -> torch.Tensor:
    """Rows of gates in ONNX's order from torch's, or gradients likewise."""
    parts = t.chunk(len(ORDER[case.op]))
    return torch.cat([parts[i] for i in ORDER[case.op]])


def stacked(case: Case, layer: nn.RNNBase, kind: str, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    names = [f"{kind}_l0{suffix}" for suffix in ("", "_reverse")[:1 + case.both]]
    return torch.stack([rows(case, of(getattr(layer, name))) for name in names])


def weights(case: Case, layer: nn.RNNBase, of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    both = [stacked(case, layer, kind, of) for kind in ("weight_ih", "weight_hh")]
    biases = [stacked(case, layer, kind, of) for kind in ("bias_ih", "bias_hh")] if case.bias else []
    return [*both, *([torch.cat(biases, 1)] if biases else [])]


def inputs(case: Case) -> list[torch.Tensor]:
    """x and, where the case has them, initial states, in float64."""
    torch.manual_seed(case.batch * 7 + case.size)
    state = (1 + case.both, case.batch, case.hidden)
    shapes = [(case.steps, case.batch, case.size), *[state] * case.states, *[state] * (case.states and case.op == "LSTM")]
    return [torch.randn(shape, dtype=WIDE).to(case.dtype).double() for shape in shapes]


def eager(case: Case) -> list[torch.Tensor]:
    """Outputs and gradients of x, the weights and the states."""
    layer = layer_of(case)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p.to(case.dtype))
    x, *states = (t.requires_grad_() for t in inputs(case))
    y, last = layer(x, tuple(states) if len(states) == 2 else states[0] if states else None)
    lasts = list(last) if case.op == "LSTM" else [last]
    y = y.view(case.steps, case.batch, 1 + case.both, case.hidden).transpose(1, 2)
    outputs = [t for t, name in zip([y, *lasts], "yhc", strict=False) if name in case.outputs]
    torch.autograd.backward(outputs, gradients(case, outputs))
    grad = lambda t: torch.zeros_like(t) if t.grad is None else t.grad  # noqa: E731
    return [t.detach() for t in (*outputs, grad(x), *weights(case, layer, grad), *map(grad, states))]


def gradients(case: Case, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(t.shape, dtype=WIDE).to(case.dtype).to(t.dtype).to(t.device) for t in outputs]


def model_of(case: Case) -> bytes:
    kind = KINDS[case.dtype]
    tensors = operands(case)
    names = ["x", "w", "r", *["b"] * case.bias, *["h"] * case.states, *["c"] * (case.states and case.op == "LSTM")]
    given = ", ".join(f"{kind}[{', '.join(map(str, t.shape))}] {name}" for t, name in zip(tensors, names, strict=True))
    args = ["x", "w", "r", "b" if case.bias else "", "", *(["h"] if case.states else [""]),
            *(["c"] if case.states and case.op == "LSTM" else [])]
    results = [name if name in case.outputs else "" for name in ("yhc" if case.op == "LSTM" else "yh")]
    attributes = [f"hidden_size = {case.hidden}", *(['direction = "bidirectional"'] if case.both else []),
                  *(["linear_before_reset = 1"] if case.op == "GRU" else [])]
    if case.op == "RNN":
        attributes.append("activations = [" + ", ".join([f'"{case.activation}"'] * (1 + case.both)) + "]")
    node = onnx.helper.make_node(case.op, [*args], ["Y" + r if r else "" for r in results])
    text = (f'<ir_version: 10, opset_import: ["" : 20]> g ({given}) => ('
            + ", ".join(f"{kind} Y{r}" for r in results if r) + f') {{ t = {case.op} <{", ".join(attributes)}> (x, w, r) }}')
    model = onnx.parser.parse_model(text)
    node.attribute.extend(model.graph.node[0].attribute)
    del model.graph.node[:]
    model.graph.node.append(node)
    return model.SerializeToString()


def operands(case: Case) -> list[torch.Tensor]:
    layer = layer_of(case)
    x, *states = inputs(case)
    return [t.detach().to(case.dtype).contiguous() for t in (x, *weights(case, layer, lambda p: p), *states)]


def is_exact() -> bool:
    """Which kernel runs is known: on a GPU the library may decline."""
    return not DEVICE.startswith("cuda")


def on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors if is_exact() else [t.to(DEVICE) for t in tensors]


def runs() -> int:
    return ctypes.CDLL(PLUGIN).ont_emulate_rnn_runs() if is_exact() else 0


def kernels(session: _C.Session) -> set[str]:
    return {kernel for _, _, kernel, *_ in session.timeline()} & (LAYERS | STEPS)


def step(session: _C.Session, case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs, run = session.forward(tensors, bytes([1] * len(tensors)), 11)
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    return [t.clone() for t in (*outputs, *run.backward(saved, gradients(case, outputs)))]


def agree(case: Case, got: list[torch.Tensor]) -> None:
    want = eager(case)
    assert len(got) == len(want), (len(got), len(want))
    tol = TOLERANCES[case.dtype]
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, (case, k, a.shape, b.shape)
        error = (a.cpu().double() - b).abs().max().item() / max(1.0, b.abs().max().item())
        assert error < tol, f"{case}: tensor {k}: {error:.2e}"


def cases() -> set[str]:
    """Either cuDNN computes the layer or, where it declines, the own kernels do; in most cases it takes it."""
    used: set[str] = set()
    taken = 0
    for case in CASES:
        print(case, file=sys.stderr, flush=True)
        session, tensors = _C.Session(model_of(case), 16, DEVICE), on_device(operands(case))
        for _ in range(2):
            agree(case, step(session, case, tensors))
        assert kernels(session) in (LAYERS, set() if case.dtype in (HALF, BRAIN) else STEPS), kernels(session)
        taken += kernels(session) == LAYERS
        used |= {f"{op}:{kernel}" for _, op, kernel, *_ in session.timeline()}
    assert not is_exact() or taken > len(CASES) // 2, taken
    assert not any("differ" in line for line in MESSAGES.lines), MESSAGES.lines
    return used


def taken_case(**more: object) -> Case:
    """A layer that the emulated library does not decline, whatever the seed."""
    for hidden in range(3, 20):
        case = Case("LSTM", 4, 2, 5, hidden, **more)
        session, tensors = _C.Session(model_of(case), 16, DEVICE), on_device(operands(case))
        agree(case, step(session, case, tensors))
        if kernels(session) == LAYERS:
            return case
    raise AssertionError("no layer is taken")


def partly() -> set[str]:
    """Gradients of some operands alone: frozen weights, an input that needs none, a bias alone."""
    case = taken_case(both=True)
    tensors, want = on_device(operands(case)), eager(case)[3:]  # behind y, h and c
    for mask in ([1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1], [0, 0, 1, 0, 0, 0]):
        session = _C.Session(model_of(case), 16, DEVICE)
        outputs, run = session.forward(tensors, bytes(mask), 11)
        saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
        got = run.backward(saved, gradients(case, outputs))
        for a, b, wanted in zip(got, want, mask, strict=True):
            assert (a is not None) == bool(wanted), mask
            assert a is None or (a.cpu().double() - b).abs().max() < 2e-5 * max(1.0, b.abs().max()), mask
        assert kernels(session) == LAYERS, mask
    return set()


def recorded() -> set[str]:
    """Calls that are replayed from a graph give what those before them gave."""
    case = taken_case(both=True)
    session, tensors = _C.Session(model_of(case), 16, DEVICE), on_device(operands(case))
    agree(case, replayed(session, lambda: step(session, case, tensors)))
    return set()


def inference() -> set[str]:
    case = taken_case(both=True)
    session, tensors = _C.Session(model_of(case), 16, DEVICE), on_device(operands(case))
    outputs, _ = session.forward(tensors, bytes(len(tensors)), 11)
    for a, b in zip(outputs, eager(case), strict=False):
        assert (a.cpu().double() - b).abs().max() < 2e-5
    assert kernels(session) == {"cuda_rnn_dnn"}
    return set()


def by_rule() -> set[str]:
    """Kernels chosen by rule add in one order: cuDNN computes the layer only with a workspace that makes it so."""
    case = taken_case()
    _C.set_deterministic(True)
    try:
        for workspace, expected in (("", STEPS), (":4096:2", LAYERS), (":4096:8", STEPS), (":16:8", LAYERS)):
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
            session = _C.Session(model_of(case), 16, DEVICE)
            agree(case, step(session, case, on_device(operands(case))))
            assert kernels(session) == expected, (workspace, kernels(session))
    finally:
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        _C.set_deterministic(False)
    return set()


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True, dropout=0.0)
        self.gru, self.rnn = nn.GRU(10, 7), nn.RNN(7, 4, nonlinearity="relu")

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, (h, c) = self.lstm(x, (h, c))
        y, last = self.gru(y.transpose(0, 1))
        return self.rnn(y)[0], h.mean() + c.mean() + last.mean()


def models() -> set[str]:
    """Layers as torch exports them: batch first, stacked, in both directions, with initial states."""
    torch.manual_seed(0)
    module = Tagger().to("cpu" if is_exact() else DEVICE)
    _runner.device_of = lambda tensors: DEVICE
    model = ORTModule(copy.deepcopy(module))
    tensors = on_device([torch.randn(3, 8, 6), torch.randn(4, 3, 5), torch.randn(4, 3, 5)])
    found = []
    for m in (module, model):
        given = [t.clone().requires_grad_() for t in tensors]
        outputs = m(*given)
        (outputs[0].square().sum() + outputs[1]).backward()
        found.append([*outputs, *(t.grad for t in given), *(p.grad for p in m.parameters())])
    assert not _report.stats(model)["fallback_steps"], _report.stats(model)["reasons"]
    for k, (a, b) in enumerate(zip(*found, strict=True)):
        assert torch.allclose(a, b, rtol=2e-4, atol=2e-5), (k, (a - b).abs().max())
    return set()


FAULTS = {"gates": "differ", "directions": "differ", "halves": "differ", "last": "differ", "state": "differ",
          "forward": "status", "weights": "status", "declines": ""}


def faults() -> set[str]:
    """A layer that computes something else is found before it is used: the own kernels compute it, a warning says so."""
    for i, (fault, message) in enumerate(FAULTS.items()):
        for k, (op, dtype) in enumerate((("LSTM", torch.float32), ("GRU", WIDE), ("LSTM", HALF), ("GRU", BRAIN))):
            os.environ["ONT_EMULATE_RNN_FAULT"] = fault
            case = Case(op, 3 + k, 2, 20 + i, 20 + i, both=True, dtype=dtype)
            session, tensors = _C.Session(model_of(case), 16, DEVICE), on_device(operands(case))
            for call in range(2):
                agree(case, step(session, case, tensors))
                assert len([line for line in MESSAGES.lines if message and "the own kernels" in line]) == (
                    1 if message and not call else 0), (fault, MESSAGES.lines)
                assert call or any(message in line for line in MESSAGES.lines) == bool(message), MESSAGES.lines
                MESSAGES.lines.clear()
            assert kernels(session) == (STEPS if k < 2 else set()), (fault, kernels(session))
            del os.environ["ONT_EMULATE_RNN_FAULT"]
    return set()


CHECKS: list[Callable[[], set[str]]] = [cases, partly, recorded, inference, by_rule, models]


def main(plugin: str, device: str, which: str = "0/1") -> None:
    global PLUGIN, DEVICE
    PLUGIN, DEVICE = plugin, device
    _C.open_plugin(plugin or None)
    _C.set_timing(True)
    logging.getLogger("onnxtrain").addHandler(MESSAGES)
    run_checks([faults] if which == "faults" else every_nth(CHECKS, which))


if __name__ == "__main__":
    main(*sys.argv[1:])
