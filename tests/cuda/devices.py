"""Modules on two devices of one process: interleaved steps, a module that moves, tensors on the wrong device.

    python tests/cuda/devices.py PLUGIN KIND [part/parts | NAME,...]

KIND is "emulated", or "cuda" where the machine has two GPUs. On the emulated devices memory is apart: work of one
device that touches the other's memory ends the process. Prints what checks.py says.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import models
import torch
from checks import every_nth, run_checks
from onnx import TensorProto, helper
from torch import nn

from onnxtrain import _C, UnsupportedError, stats
from onnxtrain.optim import FusedAdam, _base, _clip
from onnxtrain.ortmodule import ORTModule, _runner


class Cuda:
    """Two GPUs."""

    def name(self, index: int) -> str:
        return f"cuda:{index}"

    def put(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        return tensor.to(self.name(index))

    def owner(self, tensor: torch.Tensor) -> int:
        return tensor.device.index


class Emulated:
    """To torch, tensors of the emulated devices are on the CPU: whose a tensor is follows from its address."""

    def __init__(self, plugin: str) -> None:
        self._library = ctypes.CDLL(plugin)
        self._library.ont_emulate_take.restype = ctypes.c_void_p
        self._library.ont_emulate_set_apart()
        self._library.ont_emulate_set_slow_epilogues(0)  # else the devices may choose differently, for other bits
        describe = _runner.describe
        _runner.device_of = self._device_of
        _runner.describe = lambda leaf: ((describe(leaf), self.owner(leaf)) if isinstance(leaf, torch.Tensor)
                                         else describe(leaf))
        _base.device_of = lambda tensor: self.name(self.owner(tensor)) if self.owner(tensor) >= 0 else ""
        _C.signature = lambda args: None  # which knows torch's devices only

    def name(self, index: int) -> str:
        return f"emulated:{index}"

    def put(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        at = self._library.ont_emulate_take(index, ctypes.c_size_t(tensor.nbytes))
        memory = (ctypes.c_char * tensor.nbytes).from_address(at)
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)

    def owner(self, tensor: torch.Tensor) -> int:
        """-1: memory of the host, which both may use, as what torch computes between the engine's steps."""
        return self._library.ont_emulate_owner(ctypes.c_void_p(tensor.data_ptr()))

    def opened(self, index: int) -> int:
        """How often cuDNN's handle of a device has been asked for."""
        return self._library.ont_emulate_dnn_opened(index)

    def _device_of(self, tensors: Sequence[torch.Tensor]) -> str:
        owners = {self.owner(tensor) for tensor in tensors} - {-1}
        if len(owners) > 1:
            raise UnsupportedError(f"tensors are on several devices ({owners}): move them to one")
        return self.name(owners.pop()) if owners else "cpu"


PLACES: Any


def move(module: nn.Module, index: int) -> nn.Module:
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = PLACES.put(tensor.data, index)
        tensor.grad = None
    return module


class Trained:
    """A model of models.py with FusedAdam, on a device, or with None on the CPU."""

    def __init__(self, kind: str, index: int | None, clip: float | None = None) -> None:
        torch.manual_seed(0)
        module, self.batch, self.loss = models.MODELS[kind]()
        self.index = index
        self.model = ORTModule(module if index is None else move(module, index))
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-2, max_grad_norm=clip)

    def step(self, seed: int) -> float:
        """With numbers of the batch that the seed draws."""
        torch.manual_seed(seed)
        batch = [torch.randn(t.shape) if t.is_floating_point() else t[torch.randperm(len(t))] for t in self.batch]
        if self.index is not None:
            batch = [PLACES.put(t, self.index) for t in batch]
        self.optimizer.zero_grad()
        loss = self.loss(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def values(self) -> list[torch.Tensor]:
        return [t.detach().cpu() for t in (*self.model.parameters(), *self.model.buffers())]


def device_work(trained: Trained) -> set[str]:
    """Where the programs of a model are."""
    assert not stats(trained.model)["fallback_steps"]
    return {program.device for _, programs in trained.model._all_programs() for program in programs}


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=2e-3, atol=2e-4), (a.double() - b.double()).abs().max()


def interleave(kind: str, clip: float | None = None, steps: int = 8) -> None:
    """Each step on the first device, then on the second, then on the CPU."""
    _C.set_timing(False)  # steps that are timed are not replayed from graphs
    first, second, cpu = (Trained(kind, index, clip) for index in (0, 1, None))
    before = PLACES.put(torch.zeros(3), 0)
    for seed in range(steps):
        one, other, want = (trained.step(seed) for trained in (first, second, cpu))
        assert one == other and abs(one - want) < 2e-3 * max(1.0, abs(want)), (seed, one, other, want)
    assert all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))
    close(first.values(), cpu.values())
    assert [device_work(trained) for trained in (first, second, cpu)] == [{PLACES.name(0)}, {PLACES.name(1)}, {"cpu"}]
    replays = [[times for _, _, times, _ in program.session.graphs()] for trained in (first, second)
               for _, programs in trained.model._all_programs() for program in programs]
    assert all(times >= 2 for each in replays for times in each), replays
    for trained, index in ((first, 0), (second, 1)):
        assert {PLACES.owner(p) for p in trained.model.parameters()} == {index}
        assert {PLACES.owner(p.grad) for p in trained.model.parameters()} == {index}
    assert not before.any()


def interleaved(plugin: str, kind: str) -> set[str]:
    """For faults that tests plant: programs.py calls it."""
    global PLACES
    PLACES = Emulated(plugin)
    interleave(kind)
    return set()


def products_and_attention() -> None:
    interleave("gpt2")


def convolutions() -> None:
    interleave("cnn")


def recurrent_layers() -> None:
    """Plans of cuDNN's layers, and what a new one is compared with, are a device's own."""
    interleave("lstm")


def clipped() -> None:
    """The norm of all gradients is a table of its own."""
    interleave("mlp", clip=0.1)


def only_the_second() -> None:
    trained, cpu = Trained("mlp", 1), Trained("mlp", None)
    for seed in range(3):
        assert abs(trained.step(seed) - cpu.step(seed)) < 1e-4
    assert device_work(trained) == {PLACES.name(1)}


def only_the_second_is_asked() -> None:
    """Kernels accept what a program is built of with its device current: before the gradient, too."""
    if isinstance(PLACES, Cuda):
        return
    shape = [2, 4, 40, 64]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name in "qkv"]
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10).SerializeToString()
    before = [PLACES.opened(index) for index in (0, 1)]
    session = _C.Session(model, device=PLACES.name(1))
    assert session.plan([shape] * 3, b"\1\1\1")["steps"] and session.save("optimized")
    assert PLACES.opened(0) == before[0] and PLACES.opened(1) > before[1]


def moved() -> None:
    """A module that goes to the other device and back, its optimizer with it."""
    trained, cpu = Trained("cnn", 0), Trained("cnn", None)
    for seed in range(9):
        if seed % 3 == 0:
            trained.index = seed // 3 % 2
            move(trained.model, trained.index)
            for state in trained.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[name] = PLACES.put(value, trained.index)
        assert abs(trained.step(seed) - cpu.step(seed)) < 2e-3, seed
        gc.collect()
        assert device_work(trained) == {PLACES.name(trained.index)}, "a program for the other device keeps its memory"
    close(trained.values(), cpu.values())


def clip_and_norm() -> None:
    """Tables of clip_grad_norm_ are a device's own."""
    lists = _clip.Lists()
    torch.manual_seed(0)
    given = [torch.randn(40, 30), torch.randn(7)]
    norm = torch.stack([t.double().square().sum() for t in given]).sum().sqrt()
    for _ in range(3):
        for index in (0, 1):
            there = [PLACES.put(t, index) for t in given]
            assert torch.allclose(lists.norm(PLACES.name(index), there).cpu(), norm)


def two_threads() -> None:
    """Each device has a thread of its own, as torch.nn.parallel's users do."""
    import threading

    trained = [Trained("mlp", index) for index in (0, 1)]
    for each in trained:
        each.step(0)  # built one after the other: seeds are a thread's, the generator is not
    x = [PLACES.put(torch.randn(8, 20), index) for index in (0, 1)]
    alone = [each.model(value).detach().clone() for each, value in zip(trained, x, strict=True)]
    wrong: list[str] = []

    def run(index: int) -> None:
        for _ in range(20):
            if not torch.equal(trained[index].model(x[index]), alone[index]):
                wrong.append(PLACES.name(index))

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def wrong_device() -> None:
    """An argument on the other device than the weights: PyTorch runs the call, or where the policy forbids that, an
    exception says so, before and behind calls that were right.
    """
    trained = Trained("mlp", 0)
    x = torch.randn(8, 20)
    here, there = PLACES.put(x, 0), PLACES.put(x, 1)
    want = trained.model(here)
    for _ in range(2):
        try:
            got = trained.model(there)
        except RuntimeError as error:  # PyTorch's own
            assert "device" in str(error)
        else:
            assert torch.allclose(got, want, atol=1e-5)
        assert torch.equal(trained.model(here), want)
    assert stats(trained.model)["fallback_steps"] == 2


CHECKS: list[Callable[[], None]] = [products_and_attention, convolutions, recurrent_layers, clipped, only_the_second,
                                    only_the_second_is_asked,
                                    moved, clip_and_norm, two_threads, wrong_device]


def main(plugin: str, kind: str, which: str = "0/1") -> None:
    global PLACES
    _C.open_plugin(plugin or None)
    PLACES = Emulated(plugin) if kind == "emulated" else Cuda()
    run_checks(every_nth(CHECKS, which) if "/" in which else [globals()[name] for name in which.split(",")])


if __name__ == "__main__":
    main(*sys.argv[1:])
