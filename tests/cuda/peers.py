"""Several processes, or threads, whose devices exchange tensors by NCCL. For test_nccl.py, which starts them by mpirun,
and for programs.py.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import NamedTuple

import devices
import pytest
import torch
import torch.distributed as dist
from test_training_distributed import data_of, elements_of_moments, part, trainer_of, weights, wide
from torch import nn

from onnxtrain import _C, UnsupportedError, _report, stats
from onnxtrain.optim import FusedAdam
from onnxtrain.ortmodule import ORTModule
from onnxtrain.training import _collectives, _nccl, _trainer_step, _update

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
          torch.uint8]
COUNT = 70001  # elements of float32 in five pieces of the emulated library's shared memory, the last one short


def on_device(plugin: str, index: int) -> devices.Emulated:
    """A process whose tensors count as that device's, and whose weights may be put there."""
    _C.open_plugin(plugin)
    devices.PLACES = places = devices.Emulated(plugin)
    _nccl.place_of = lambda device: places.name(index)
    _nccl.is_there = lambda value: True
    return places


def calls(plugin: str) -> int:
    return ctypes.CDLL(plugin).ont_emulate_nccl_calls()


# ---- collectives ----

def large_part(rank: int) -> torch.Tensor:
    """By a generator of its own: ranks that are threads draw at the same time."""
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(rank))


def exchange(comm: object, places: devices.Emulated, index: int, rank: int, size: int) -> dict:
    """Every collective of every dtype, with memory of this device."""
    found: dict = {}
    for dtype in DTYPES:
        value = places.put(torch.arange(7).to(dtype) * (rank + 1), index)
        _C.comm_enqueue(comm, "all_reduce", value, value)
        own = places.put(torch.zeros(2, dtype=dtype), index)
        _C.comm_enqueue(comm, "reduce_scatter", places.put(torch.arange(2 * size).to(dtype) * (rank + 1), index), own)
        whole = places.put(torch.zeros(2 * size, dtype=dtype), index)
        _C.comm_enqueue(comm, "all_gather", own, whole)
        sent = places.put(torch.full((3,), rank).to(dtype), index)
        _C.comm_enqueue(comm, "broadcast", sent, sent, size - 1)
        found[dtype] = [t.clone() for t in (value, own, whole, sent)]
    masks = places.put(torch.tensor([rank == 0, False, True]), index)
    _C.comm_enqueue(comm, "all_reduce", masks, masks)
    large = places.put(large_part(rank), index)
    _C.comm_enqueue(comm, "all_reduce", large, large)
    within = places.put(torch.arange(2.0 * size) * (rank + 1), index)  # parts of the same memory
    _C.comm_enqueue(comm, "reduce_scatter", within, within[2 * rank:2 * rank + 2])
    _C.comm_enqueue(comm, "all_gather", within[2 * rank:2 * rank + 2], within)
    _C.comm_check(comm)
    return {**found, "masks": masks.clone(), "large": large.clone(), "within": within.clone()}


def check_exchanged(found: dict, rank: int, size: int) -> None:
    total = sum(range(1, size + 1))
    for dtype in DTYPES:
        value, own, whole, sent = found[dtype]
        assert torch.equal(value, (torch.arange(7) * total).to(dtype)), dtype
        assert torch.equal(own, (torch.arange(2 * size) * total)[2 * rank:2 * rank + 2].to(dtype)), dtype
        assert torch.equal(whole, (torch.arange(2 * size) * total).to(dtype)), dtype
        assert torch.equal(sent, torch.full((3,), size - 1).to(dtype)), dtype
    assert found["masks"].tolist() == [True, False, True], found["masks"]
    assert torch.equal(found["within"], torch.arange(2.0 * size) * total), found["within"]
    want = torch.zeros(COUNT)
    for other in range(size):
        want += large_part(other)
    assert torch.equal(found["large"], want), "large"


def two_ranks(plugin: str) -> set[str]:
    """Two threads, each with a device; tests plant faults into what they call."""
    os.environ["ONT_EMULATE_NCCL_LIMIT"] = "3"
    places = devices.Emulated(plugin)
    id_of_both = _C.comm_id("emulated:0")
    found: list[dict] = [{}, {}]

    def run(rank: int) -> None:
        comm = _C.comm_open(places.name(rank), id_of_both, rank, 2)
        found[rank] = exchange(comm, places, rank, rank, 2)
        _C.comm_close(comm, False)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in (0, 1):
        check_exchanged(found[rank], rank, 2)
    return set()


def collectives(rank: int, plugin: str) -> dict:
    """In three processes, by the trainer's table; and what is refused before anything is enqueued."""
    places = on_device(plugin, rank % 2)
    table = _collectives.MpiCollectives(torch.device("cpu"))
    comm = table._nccl._comm
    found = exchange(comm, places, rank % 2, rank, 3)
    for error, message, *arguments in (
            (ValueError, "not contiguous", "all_reduce", torch.ones(4, 4).t(), torch.ones(4, 4).t()),
            (ValueError, "5 elements of float do not make 2 of float in 3 processes", "reduce_scatter", torch.empty(5),
             torch.empty(2)),
            (ValueError, "2 elements of float do not make 6 of double in 3 processes", "all_gather", torch.empty(2),
             torch.empty(6).double()),
            (ValueError, "no collective 'reduce'", "reduce", torch.empty(2), torch.empty(2)),
            (UnsupportedError, "NCCL has no dtype int16", "all_reduce", torch.ones(2).short(), torch.ones(2).short())):
        with pytest.raises(error, match=message):
            _C.comm_enqueue(comm, *arguments)
    short = torch.full((3,), rank, dtype=torch.int16)  # goes by MPI
    table.all_reduce(short)
    wait = table.start_all_reduce(value := torch.full((4,), float(rank)))
    wait()
    with pytest.raises(RuntimeError, match="rank 0 calls all_reduce of 2 numbers of torch.float32, rank 1 calls "
                                           "all_reduce of 3 numbers.*, rank 2 calls broadcast of 2 numbers"):
        (table.broadcast if rank == 2 else table.all_reduce)(torch.ones(3 if rank == 1 else 2))
    _C.comm_close(comm, False)
    with pytest.raises(RuntimeError, match="is closed"):
        _C.comm_check(comm)
    return {**found, "short": short, "value": value}


# ---- training ----

class Stepped(_update.Update):
    """Weights of the emulated device are on the CPU to torch, whose update would be the CPU's."""

    is_one_call = property(lambda self: False, lambda self, value: None)


def train(rank: int, plugin: str, stages: tuple[int, ...] = (0, 1)) -> dict:
    """Losses, weights and the elements of the optimizer's state of each configuration and stage of ZeRO."""
    os.environ["ONNXTRAIN_DISABLE"] = "whole_step"
    on_device(plugin, rank)
    _trainer_step.Update = Stepped
    found: dict = {"calls": calls(plugin)}
    for config, steps in (("adam", 1), ("lamb", 2), ("sgd", 1)):
        for stage in stages:
            module = devices.move(wide(rank), rank)
            trainer = trainer_of(rank, config, 2, stage, steps, module=module)
            losses = [trainer.train_step(x, y)[0] for x, y in part(data_of(6, 2), rank)]
            assert {devices.PLACES.owner(p) for p in module.parameters()} == {rank}
            assert not stats()["fallback_steps"], stats()
            assert {program.device for program in _report._programs} == {devices.PLACES.name(rank)}
            found[config, stage] = losses, weights(trainer), elements_of_moments(trainer)
    found["calls"] = calls(plugin) - found["calls"]
    return found


def alone(config: str, steps: int) -> tuple[list, dict]:
    """One process on the CPU with the batches of both."""
    trainer = trainer_of(0, config, 1, 0, steps)
    return [trainer.train_step(x, y)[0] for x, y in data_of(6, 2)], weights(trainer)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


def fit(model: nn.Module, data: list) -> list[torch.Tensor]:
    """The weights that FusedAdam makes of a few batches."""
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def distributed(rank: int, plugin: str) -> list[torch.Tensor]:
    """DistributedDataParallel by gloo, with a device for each process."""
    places = on_device(plugin, rank)
    dist.init_process_group("gloo")
    module = devices.move(layers(), rank)
    for parameter in module.parameters():
        parameter.data.mul_(1 + rank)  # the wrapper gives all processes those of the first
    model = ORTModule(module)
    data = [(places.put(x, rank), y) for x, y in part(data_of(5, 2), rank)]
    found = fit(nn.parallel.DistributedDataParallel(model), data)
    assert devices.device_work(Held(model)) == {places.name(rank)}
    assert {places.owner(p) for p in module.parameters()} == {rank}
    return found


class Held(NamedTuple):
    model: ORTModule


def ends(rank: int, plugin: str) -> str:
    """Process 1 ends behind the first step."""
    os.environ["ONNXTRAIN_DISABLE"] = "whole_step"
    on_device(plugin, rank)
    trainer = trainer_of(0, "adam", 2, 0, module=devices.move(wide(0), rank))
    data = part(data_of(2, 2), rank)
    trainer.train_step(*data[0])
    if rank:
        return ""
    with pytest.raises(RuntimeError, match="rank 0 of 2: all_reduce failed: rank 1 has ended"):
        trainer.train_step(*data[1])
    return "heard"
