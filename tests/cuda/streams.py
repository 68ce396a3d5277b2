"""The engine on streams in turns: the emulated device ends the process where work of a stream reads or writes memory
whose last use, on another stream, it has not waited for, or where such memory is freed.

    python tests/cuda/streams.py PLUGIN emulated [part/parts]

Streams are numbers. The caller orders what is his, such as weights, as with torch.cuda.Stream.wait_stream(); the engine
orders its own memory. Prints what checks.py says.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

import devices
import torch
from checks import every_nth, run_checks
from device_memory import steps_of
from torch import nn

from onnxtrain import _C
from onnxtrain.optim import FusedAdam, _clip
from onnxtrain.ortmodule import ORTModule

LIBRARY: ctypes.CDLL
PRODUCT = """<ir_version: 10, opset_import: ["" : 20]> g (float[16, 20] x, float[20, 30] w) => (float[16, 30] y)
    <float[30] c = {%s}> { a = MatMul(x, w)  b = Mul(a, c)  y = Tanh(b) }""" % ", ".join(f"{k / 30:.3f}" for k in range(30))


def on(stream: int) -> None:
    """Makes a stream current."""
    LIBRARY.ont_emulate_set_stream(ctypes.c_void_p(stream or None))


def wait(stream: int, other: int) -> None:
    """As stream.wait_stream(other)."""
    LIBRARY.ont_emulate_join_streams(ctypes.c_void_p(stream), ctypes.c_void_p(other))


def put(tensor: torch.Tensor) -> torch.Tensor:
    return devices.PLACES.put(tensor, 0)


def product() -> _C.Session:
    import onnx

    return _C.Session(onnx.parser.parse_model(PRODUCT).SerializeToString(), 16, "emulated")


def program(calls: int) -> None:
    """Forward and backward on two streams in turns, as kernels and as graphs, with inputs that move to static buffers;
    then the program is freed while a third stream is current. Each stream has inputs of its own.
    """
    torch.manual_seed(0)
    model, scale = product(), torch.arange(30).div(30).mul(1000).round().div(1000)
    given = {stream: [[put(torch.randn(16, 20)), put(torch.randn(20, 30)), put(torch.randn(16, 30))] for _ in range(2)]
             for stream in (1, 2)}
    for k in range(calls):
        on(stream := 1 + k % 2)
        x, w, dy = given[stream][k // 2 % 2 if k > 7 else 0]
        y, (dx, dw) = steps_of(model, [x, w], dy)
        want = torch.tanh(x @ w * scale)
        grad = dy * (1 - want**2) * scale
        assert torch.allclose(y, want, atol=1e-5)
        assert torch.allclose(dx, grad @ w.t(), atol=1e-4) and torch.allclose(dw, x.t() @ grad, atol=1e-4)
    assert all(replayed >= 3 for _, _, replayed, _ in model.graphs()), model.graphs()
    on(3)
    del model
    gc.collect()


def programs() -> None:
    """The stream that static buffers were allocated on is the last one to use them, or is not."""
    for calls in (14, 15):
        program(calls)


def runs_of_one_program() -> None:
    """Two forwards wait for their backward, each on its own stream."""
    torch.manual_seed(0)
    model = product()
    given = {stream: [put(torch.randn(16, 20)), put(torch.randn(20, 30))] for stream in (1, 2)}
    for _ in range(4):
        waiting = []
        for stream in (1, 2):
            on(stream)
            waiting.append(model.forward(given[stream], b"\1\1", 0))
        for stream, (outputs, run) in zip((1, 2), waiting, strict=True):
            on(stream)
            saved = [given[stream][i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
            run.backward(saved, [put(torch.ones(16, 30))])
        del waiting, outputs, run, saved


def modules() -> None:
    """Steps of a module and of its optimizer on two streams in turns: the caller orders the weights."""
    torch.manual_seed(0)
    layers = devices.move(nn.Sequential(nn.Linear(20, 33), nn.GELU(approximate="tanh"), nn.Linear(33, 5)), 0)
    model = ORTModule(layers)
    optimizer, losses, held = FusedAdam(model.parameters(), lr=1e-2, max_grad_norm=0.5), [], []
    for k in range(8):
        on(stream := 1 + k % 2)
        wait(stream, 3 - stream)
        optimizer.zero_grad()
        x = put(torch.randn(8, 20).sign())
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        held.append([x, *(p.grad for p in model.parameters())])  # of streams' own, until both have waited
    assert losses[-1] < losses[0]
    wait(1, 2)
    wait(2, 1)
    held.clear()
    del model, optimizer
    gc.collect()


def clipping() -> None:
    """One set of tables, for tensors of each stream."""
    torch.manual_seed(0)
    lists = _clip.Lists()
    given = {stream: [put(torch.randn(40, 30)), put(torch.randn(7))] for stream in (1, 2)}
    for k in range(6):
        on(stream := 1 + k % 2)
        lists.clip("emulated", given[stream][:1 + k // 4], 1.0)
    on(3)
    del lists
    gc.collect()


def gradients_in_another_order() -> None:
    """They are copied to memory of the optimizer, in the order of their parameter."""
    torch.manual_seed(0)
    parameter = nn.Parameter(put(torch.randn(20, 33)))
    optimizer = FusedAdam([parameter], lr=1e-2)
    for stream in (1, 2):
        on(stream)
        wait(stream, 3 - stream)
        parameter.grad = put(torch.randn(33, 20)).t()
        optimizer.step()
    on(3)
    del optimizer
    gc.collect()


CHECKS: list[Callable[[], None]] = [programs, runs_of_one_program, modules, clipping, gradients_in_another_order]


def in_turns(plugin: str) -> set[str]:
    """All checks, for faults that tests plant: programs.py calls it."""
    watch(plugin)
    for check in CHECKS:
        check()
        on(0)
    return set()


def watch(plugin: str) -> None:
    global LIBRARY
    LIBRARY = ctypes.CDLL(plugin)
    devices.PLACES = devices.Emulated(plugin)
    LIBRARY.ont_emulate_watch_streams()
    _C.set_timing(False)  # steps that are timed are not replayed


def main(plugin: str, device: str, part: str = "0/1") -> None:
    _C.open_plugin(plugin)
    assert device == "emulated", "CUDA does not say what waits for what"
    watch(plugin)
    run_checks(every_nth(CHECKS, part), lambda check: on(0))


if __name__ == "__main__":
    main(*sys.argv[1:])
