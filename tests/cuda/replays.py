"""Steps that a device records and replays, as the same steps without; for programs.py."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import onnx
import torch
from checks import exported, refusal
from compare import place
from torch import nn

from onnxtrain import _C


class Replayed:
    """A module's session beside one that is never recorded; each step runs in both and must give the same,
    bit for bit.
    """

    def __init__(self, device: str, programs: int = 16) -> None:
        self.device = device
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Dropout(0.3), nn.Linear(33, 5))
        text, tensors = exported(module, (torch.randn(8, 20),))
        model = onnx.load_model_from_string(text)
        for value in [*model.graph.input, *model.graph.output]:
            if value.name in (model.graph.input[0].name, model.graph.output[0].name):
                value.type.tensor_type.shape.dim[0].dim_param = "batch"
        self.mask = bytes([0] + [1] * (len(tensors) - 1))
        self.tensors = [t.to(place(device)) for t in tensors]
        self.plain, self.recorded = (_C.Session(model.SerializeToString(), programs, device) for _ in range(2))

    def forward(self, session: _C.Session, seed: int) -> tuple[list, _C.Run]:
        return session.forward(self.tensors, self.mask, seed)

    def backward(self, outputs: list, run: _C.Run) -> list[torch.Tensor]:
        torch.manual_seed(3)
        grad = torch.randn(outputs[0].shape).to(place(self.device))
        saved = [self.tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
        return [outputs[0].clone(), *(g.clone() for g in run.backward(saved, [grad]) if g is not None)]

    def step(self, seed: int) -> None:
        _C.set_graphs(False)
        want = self.backward(*self.forward(self.plain, seed))
        _C.set_graphs(True)
        for a, b in zip(want, self.backward(*self.forward(self.recorded, seed)), strict=True):
            assert torch.equal(a, b), (seed, (a - b).abs().max())

    def counts(self) -> dict[str, tuple[int, int, str]]:
        return {phase: (recorded, replayed, reason) for phase, recorded, replayed, reason in self.recorded.graphs()}


def untimed(check: Callable[[], None]) -> set[str]:
    _C.set_timing(False)
    try:
        check()
    finally:
        _C.set_timing(True)
        _C.set_graphs(True)
    return set()


def graphs(device: str) -> set[str]:
    """Phases are recorded after two calls and replayed: new contents and seeds are seen, an address that changes is
    noticed, and why a call was not a replay is said.
    """

    def check() -> None:
        both, counts = Replayed(device), []
        for seed in range(12):
            if seed == 8:
                assert both.counts()["forward"][1] >= 4, both.counts()
                both.tensors[0] = both.tensors[0].clone()  # another address
            both.tensors[0].normal_()
            both.tensors[1].add_(0.01)
            both.step(seed)
            if seed == 0:
                assert both.counts()["forward"] == (0, 0, "the first calls"), both.counts()
            if seed == 8:
                assert both.counts()["forward"][2] == "a tensor has moved", both.counts()
            counts.append(both.counts()["forward"])
        # As in graph_shapes: what moves before the first recording is part of that.
        moved = [recorded for recorded, _, reason in counts[:-1] if recorded and reason == "a tensor has moved"]
        assert counts[-1][0] == 1 + len(moved), counts
        assert counts[-1][1] >= 5 and {reason for *_, reason in counts[3:]} == {"", "a tensor has moved"}, counts
        assert both.counts()["backward"][1] >= 4, both.counts()
        assert both.recorded.stats()["graph_launches"] > 0

    return untimed(check)


def graph_shapes(device: str) -> set[str]:
    """Another size is another program with graphs of its own;
    the first one's are replayed again when its size comes back.
    """

    def check() -> None:
        both, counts = Replayed(device), []
        full = both.tensors[0]
        for seed in range(24):
            both.tensors[0] = full if seed // 8 != 1 else full[:5]
            both.tensors[0].normal_()
            both.step(seed)
            counts.append(both.counts()["forward"])
        for calls in (counts[:8] + counts[16:], counts[8:16]):  # of each size
            assert calls[7][1] >= 4, counts
            for (recorded, replayed, reason), after in itertools.pairwise(calls):
                if not recorded:
                    continue
                # The host's malloc may move an output: that call is no replay, and the next one records again.
                assert after[0] == recorded or (after[0] == recorded + 1 and reason == "a tensor has moved"), counts
                assert after[1] == replayed + (not after[2]) and after[2] in ("", "a tensor has moved"), counts

    return untimed(check)


def graph_freed(device: str) -> set[str]:
    """A program that is dropped from the cache while it has graphs and while a run of it waits for its backward."""

    def check() -> None:
        both = Replayed(device, programs=1)
        full = both.tensors[0]
        for seed in range(8):
            both.step(seed)
        assert both.counts()["forward"][1] >= 4, both.counts()
        waiting = both.forward(both.recorded, 7)
        _C.set_graphs(False)
        want = both.backward(*both.forward(both.plain, 7))
        _C.set_graphs(True)
        both.tensors[0] = full[:3].clone()
        for seed in range(4):
            both.step(seed)  # evicts the first program
        both.tensors[0] = full
        for a, b in zip(want, both.backward(*waiting), strict=True):
            assert torch.equal(a, b)
        del both, waiting

    return untimed(check)


def graph_of_the_caller(device: str, plugin: str) -> set[str]:
    """A stream that somebody else records is refused by name: his graph would repeat one random key."""

    def check() -> None:
        both = Replayed(device)
        both.step(0)
        if device.startswith("cuda"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                refused = refusal(lambda: both.forward(both.recorded, 1))
        else:
            library = ctypes.CDLL(plugin)
            library.ont_emulate_capture_begin()
            refused = refusal(lambda: both.forward(both.recorded, 1))
            library.ont_emulate_capture_end()
        assert "captures this stream" in refused, refused
        both.step(2)

    return untimed(check)


def settings(device: str) -> set[str]:
    """A program is of torch's flags for TF32: another setting has another program, and the first one's comes back."""
    both = Replayed(device)
    try:
        for flags, built in (((False, True), 1), ((True, True), 2), ((True, False), 3), ((False, True), 3)):
            _C.set_tf32(*flags)
            both.forward(both.recorded, 1)
            assert both.recorded.stats()["programs_built"] == built, (flags, both.recorded.stats())
    finally:
        _C.set_tf32(False, True)
    return set()
