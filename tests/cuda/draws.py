"""Random numbers of a device: those of the CPU's kernels for the same key, other ones at each step and in each replay of a
graph, and the same ones in forward, backward and recomputation.

    python tests/cuda/draws.py PLUGIN DEVICE [part/parts]

programs.py runs numbers(), samples() and replays(); this script modules under ORTModule, whose operators the engine
runs as it does for modules on a GPU. Prints what checks.py says.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import onnx
import torch
from checks import every_nth, run_checks
from compare import operators, place
from dropout import Generator
from onnx import TensorProto, ValueInfoProto, helper
from torch import nn
from torch.utils.checkpoint import checkpoint

import onnxtrain
from onnxtrain import _C
from onnxtrain._export import autograd_functions
from onnxtrain.ortmodule import ORTModule, _runner

DEVICE = "cpu"
TYPES = {TensorProto.FLOAT: torch.float32, TensorProto.DOUBLE: torch.float64, TensorProto.FLOAT16: torch.float16,
         TensorProto.BFLOAT16: torch.bfloat16}
NUMBERS = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of log and cos
SIZES = ([5], [4, 1031], [0, 3], [2048], [])


# ---- nodes ----

def model_of(*nodes: onnx.NodeProto, x: torch.Tensor | None = None) -> bytes:
    kinds = {dtype: number for number, dtype in TYPES.items()}
    inputs = [] if x is None else [helper.make_tensor_value_info("x", kinds[x.dtype], list(x.shape))]
    graph = helper.make_graph(nodes, "draws", inputs, [ValueInfoProto(name=name) for n in nodes for name in n.output])
    opset = helper.make_opsetid("", 22)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()


def node(operator: str, inputs: tuple[str, ...] = (), name: str = "y", **attributes: Any) -> onnx.NodeProto:
    made = helper.make_node(operator, inputs, [name])
    made.attribute.extend(helper.make_attribute(key, value, attr_type=onnx.AttributeProto.INTS if key == "shape" else None)
                          for key, value in attributes.items())
    return made


def on_both(device: str, model: bytes, x: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """The CPU's numbers and the device's, and the kernels used."""
    results = []
    for where in ("cpu", device):
        session = _C.Session(model, 16, where)
        tensors = [] if x is None else [x.to(place(where))]
        results.append(session.forward(tensors, bytes(len(tensors)), 2**40 + 3)[0][0].cpu())
    return *results, {f"{operator}:{kernel}" for operator, kernel in operators(session)}


def numbers(device: str) -> set[str]:
    """Every dtype, whole blocks of four words and tails: uniform numbers and Bernoulli to the bit, normal ones but for
    the roundings of log and cos.
    """
    used: set[str] = set()
    for number, dtype in TYPES.items():
        for shape in SIZES:
            uniform = node("RandomUniform", shape=shape, dtype=number, low=-1.7, high=0.3)
            want, got, names = on_both(device, model_of(uniform))
            assert got.dtype == dtype and list(got.shape) == shape and torch.equal(want, got), (dtype, shape)
            want, got, more = on_both(device, model_of(node("RandomNormal", shape=shape, dtype=number, mean=0.5, scale=2.0)))
            far = (want.double() - got.double()).abs()
            assert not (far > NUMBERS[dtype] * (1 + want.double().abs())).any(), (dtype, shape, far.max())
            used |= names | more
        x = torch.rand(1003, dtype=torch.float64).to(dtype)
        x[:8] = torch.tensor([0.0, 1.0, -0.5, 2.0] * 2).to(dtype)
        for to in (*TYPES, TensorProto.BOOL, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16,
                   TensorProto.INT32, TensorProto.UINT32, TensorProto.INT64, TensorProto.UINT64):
            want, got, names = on_both(device, model_of(node("Bernoulli", ("x",), dtype=to), x=x), x)
            assert want.dtype == got.dtype and torch.equal(want, got), (dtype, to)
            assert got[:4].double().tolist() == [0, 1, 0, 1] and 0.3 < got.double().mean() < 0.7
            used |= names
        for operator in ("RandomNormalLike", "RandomUniformLike"):  # of the input they read nothing but its shape
            want, got, names = on_both(device, model_of(node(operator, ("x",), dtype=number), x=x), x)
            assert torch.allclose(want.double(), got.double(), rtol=NUMBERS[dtype], atol=NUMBERS[dtype])
            used |= names
    return used


ROWS = {"of three classes": (3, 40, 2), "shorter than a warp": (31, 5, 3), "of two tiles": (300, 9, 4),
        "of many tiles": (9001, 20, 2), "a vocabulary": (50257, 3, 1)}


def samples(device: str) -> set[str]:
    """Rows of one tile and of more tiles than a warp has lanes; classes of probability zero; rows that have no sum."""
    used: set[str] = set()
    for what, (classes, count, rows) in ROWS.items():
        for dtype in TYPES.values() if classes < 1000 else (torch.float32,):
            torch.manual_seed(classes)
            x = (torch.randn(rows, classes) * 2).to(dtype)
            x[0, classes // 2:] = -torch.inf
            for wide in (TensorProto.INT64, TensorProto.INT32):
                want, got, names = on_both(device, model_of(node("Multinomial", ("x",), sample_size=count, dtype=wide), x=x), x)
                assert want.dtype == got.dtype and torch.equal(want, got), (what, dtype, wide)
                assert (got[0] < classes // 2).all() and (got >= 0).all() and (got < classes).all()
                used |= names
    for odd in (-torch.inf, torch.nan):
        x = torch.full((2, 400), odd)
        want, got, _ = on_both(device, model_of(node("Multinomial", ("x",), sample_size=3, dtype=TensorProto.INT32), x=x), x)
        assert torch.equal(want, got), (odd, want, got)
    return used


class Replays:
    """Two nodes of each kind in one session, which is recorded at its third call."""

    def __init__(self, device: str) -> None:
        self.x = torch.full((1, 500), 0.5)
        pairs = [node(op, ("x",), f"{op}{i}", **more) for i in range(2) for op, more in
                 (("RandomNormalLike", {"dtype": 1}), ("RandomUniformLike", {"dtype": 1}), ("Bernoulli", {"dtype": 1}),
                  ("Multinomial", {"dtype": 7, "sample_size": 500}))]
        self.x, model = self.x.to(place(device)), model_of(*pairs, x=self.x)
        self.session = _C.Session(model, 16, device, torch_random=True)

    def step(self, seed: Any) -> list[torch.Tensor]:
        return [tensor.cpu() for tensor in self.session.forward([self.x], b"\0", seed)[0]]


def replays(device: str) -> None:
    """Each replay of a recorded graph draws other numbers, and a seed repeats its numbers, in a replay or without."""
    session = Replays(device)
    steps = [session.step(seed) for seed in (*range(7), 2)]
    (_, _, replayed, _), *_ = session.session.graphs()
    assert replayed >= 5, session.session.graphs()
    for k, results in enumerate(zip(*steps)):
        assert all(torch.equal(a, b) == (i == 2 and j == 7) for i, a in enumerate(results)
                   for j, b in enumerate(results) if i < j), k
    assert not any(torch.equal(steps[0][k], steps[0][k + 4]) for k in range(4)), "two nodes draw the same numbers"


def keys(device: str) -> None:
    """A generator of torch's kind is advanced by each step, so that the next one draws other numbers."""
    gpu = device.startswith("cuda")
    made = [torch.Generator(device).manual_seed(5) if gpu else Generator(5, 0) for _ in range(2)]
    session, other = Replays(device), Replays(device)
    steps = [(session.step(made[0]), made[0].get_offset()) for _ in range(5)]
    offsets = [offset for _, offset in steps]
    assert offsets == [offsets[0] * (i + 1) for i in range(5)] and offsets[0] == 8 * 4, offsets
    assert not any(torch.equal(a, b) for (one, _), (two, _) in zip(steps, steps[1:]) for a, b in zip(one, two))
    again = [other.step(made[1]) for _ in range(5)]
    assert all(torch.equal(a, b) for (one, _), two in zip(steps, again) for a, b in zip(one, two))


# ---- modules ----

class Noisy(nn.Module):
    """Returns what it has drawn, so that eager can compute the same."""

    def __init__(self, draw: Callable[..., Any], mix: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.draw, self.mix = nn.Linear(12, 10), nn.Linear(10, 4), draw, mix

    def forward(self, x: torch.Tensor, drawn: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.inner(x).tanh()
        drawn = self.draw(h) if drawn is None else drawn
        return self.outer(self.mix(h, drawn)), drawn


class Regions(nn.Module):
    """Draws in two parts, which backward runs again where they are regions."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.again = nn.Linear(12, 12), nn.Linear(12, 4), again

    def part(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        h = layer(x)
        h = (h * torch.randn_like(h)).tanh()
        h = h * torch.bernoulli(h.detach().sigmoid())
        return h * h.gather(1, torch.multinomial(h.detach().softmax(-1), 2, replacement=True)).sum(1, keepdim=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in (self.first, self.second):
            x = checkpoint(self.part, x, layer, use_reentrant=False) if self.again else self.part(x, layer)
        return x, x


def chosen(h: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return h * h.gather(1, classes).sum(1, keepdim=True)


NOISE: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor], str]] = {
    "randn_like": (torch.randn_like, lambda h, n: h + h.abs() * n, "RandomNormal:cuda_random_fill"),
    "rand": (lambda h: torch.rand(h.shape, device=h.device), lambda h, n: (h * n).exp(),
             "RandomUniform:cuda_random_fill"),
    "bernoulli": (lambda h: torch.bernoulli(h.detach().sigmoid()), lambda h, n: h * n, "Bernoulli:cuda_random_fill"),
    "stochastic depth": (lambda h: h.new_empty((h.shape[0], 1)).bernoulli_(0.6), lambda h, n: h + h * h * n / 0.6,
                         "RandomUniform:cuda_random_fill"),
    "multinomial": (lambda h: torch.multinomial(h.detach().softmax(-1), 1), chosen, "Multinomial:cuda_multinomial"),
    "several of multinomial": (lambda h: torch.multinomial(h.detach().softmax(-1), 6, replacement=True), chosen,
                               "Multinomial:cuda_multinomial"),
    "without replacement": (lambda h: torch.multinomial(h.detach().softmax(-1), 6), chosen, "TopK:cuda_select"),
}


def gradients(model: nn.Module, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The output with all gradients of a step, and what was drawn."""
    model.zero_grad()
    y, drawn = model(*inputs)
    (y * torch.arange(y.numel(), device=y.device).view(y.shape).cos()).sum().backward()
    return [t.detach().cpu().clone() for t in (y, *(p.grad for p in model.parameters()))], drawn.detach().clone()


def sessions(model: ORTModule) -> list[_C.Session]:
    return [session for _, programs in model._all_programs() for program in programs for session in program.sessions]


def noisy(name: str) -> set[str]:
    """Steps under ORTModule, all of them on the device, against eager with the numbers that were drawn."""
    draw, mix, kernel = NOISE[name]
    where, used = place(DEVICE), set()
    made = {}
    for device, timing in (("cpu", False), (DEVICE, True), (DEVICE, False)):
        _runner.device_of = lambda tensors, device=device: device
        _C.set_timing(timing)
        module, x = Noisy(draw, mix).to(place(device)), torch.linspace(-2, 2, 72).view(6, 12).to(place(device))
        model = ORTModule(module)
        torch.manual_seed(11)
        steps = [gradients(model, x) for _ in range(6)]
        made[device, timing] = [drawn for _, drawn in steps]
        for got, drawn in steps:
            for a, b in zip(got, gradients(Noisy(draw, mix).to(where), x.to(where), drawn.to(where))[0], strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), (name, device, (a - b).abs().max())
        different = {tuple(drawn.flatten().tolist()) for _, drawn in steps}
        assert len(different) > 3, f"{name}: steps draw the same numbers"
        assert onnxtrain.stats(model)["fallback_steps"] == 0 and len(sessions(model)) == 1, onnxtrain.stats(model)
        if timing:
            steps_of = [f"{operator}:{k}" for _, operator, k, *_ in sessions(model)[0].timeline()]
            assert kernel in steps_of, steps_of
            used = set(steps_of)
        elif device != "cpu":
            assert all(replayed for _, _, replayed, _ in sessions(model)[0].graphs()), sessions(model)[0].graphs()
    if not DEVICE.startswith("cuda"):  # with one generator
        for one in made.values():
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(one, made["cpu", False])), name
    return used


def memory_levels() -> set[str]:
    """The same where backward computes again what is cheap."""
    os.environ["ORTMODULE_MEMORY_OPT_LEVEL"] = "2"
    try:
        return noisy("randn_like") | noisy("rand")
    finally:
        del os.environ["ORTMODULE_MEMORY_OPT_LEVEL"]


def recomputed() -> set[str]:
    """A region that backward runs again draws what it has drawn in forward."""
    results, x = [], torch.linspace(-2, 2, 72).view(6, 12).to(place(DEVICE))
    _runner.device_of = lambda tensors: DEVICE
    for again, timing in ((False, False), (True, False), (True, True)):
        _C.set_timing(timing)
        model = ORTModule(Regions(again).to(place(DEVICE)))
        torch.manual_seed(3)
        results.append([tensor for _ in range(6) for tensor in gradients(model, x)[0]])
        assert onnxtrain.stats(model)["fallback_steps"] == 0 and len(sessions(model)) == 1, onnxtrain.stats(model)
    for one in results[1:]:
        for a, b in zip(results[0], one, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), (a - b).abs().max()
    used = [f"{operator}:{kernel}" for _, operator, kernel, *_ in sessions(model)[0].timeline()]
    assert all(used.count(kernel) == 4 for kernel in ("RandomNormal:cuda_random_fill", "Bernoulli:cuda_random_fill",
                                                      "Multinomial:cuda_multinomial")), used
    return set(used)


def named(name: str) -> Callable[[], set[str]]:
    def check() -> set[str]:
        return noisy(name)

    check.__name__ = name
    return check


CHECKS: list[Callable[[], Any]] = [*(named(name) for name in NOISE), memory_levels, recomputed]


def main(plugin: str, device: str, part: str = "0/1") -> None:
    global DEVICE
    DEVICE = device
    _C.open_plugin(plugin or None)
    os.environ["ORTMODULE_CACHE_DIR"] = tempfile.mkdtemp()
    autograd_functions.drawn_by_torch = dict  # as for a module on a GPU: the engine draws
    run_checks(every_nth(CHECKS, part))


if __name__ == "__main__":
    main(*sys.argv[1:])
