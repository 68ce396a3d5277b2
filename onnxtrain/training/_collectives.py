"""Collectives of all processes of a run: by torch.distributed, or by MPI through onnxtrain._mpi.

Used by _distributed.py, which says what is sent; and which process this is, as its launcher told the environment.
With MPI, tensors of a GPU go through NCCL (_nccl.py) where all processes have it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onnxtrain import _C
from onnxtrain.training import _nccl

# Torch 2.13 has new names, and warns of those of before.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# ---- what the launcher says ----

def lacking() -> list[str]:
    """Variables of torchrun's that are not in the environment."""
    return [name for name in _TORCHRUN if name not in os.environ]


def by_mpirun() -> bool:
    """Whether Open MPI's mpirun has started this process, and torchrun has not."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ and bool(lacking())


def _number(mpi: str, torchrun: str, alone: int) -> int:
    name = f"OMPI_COMM_WORLD_{mpi}" if by_mpirun() else torchrun
    return int(os.environ.get(name, alone))


def world_rank() -> int:
    """Of this process among all, by mpirun's environment or torchrun's; 0 where there is one."""
    return _number("RANK", "RANK", 0)


def world_size() -> int:
    """How many processes there are."""
    return _number("SIZE", "WORLD_SIZE", 1)


def local_rank() -> int:
    """Of this process among those of its machine."""
    return _number("LOCAL_RANK", "LOCAL_RANK", 0)


def local_size() -> int:
    """How many processes this machine has."""
    return _number("LOCAL_SIZE", "LOCAL_WORLD_SIZE", 1)


# ---- the table ----

class Collectives:
    """What all processes do at the same time and in the same order, by torch.distributed, which has been initialised.
    Tensors are contiguous.

    Attributes:
        rank: of this process. size: how many there are.

    Every method raises RuntimeError where another process has ended.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, value: Tensor) -> None:
        """Replaces a tensor by the sum of all processes'."""
        dist.all_reduce(value)

    def start_all_reduce(self, value: Tensor) -> Callable[[], object]:
        """Begins to; what is returned waits until the sum is there. Meanwhile other all-reduces may begin, and no
        collective of another kind.
        """
        return dist.all_reduce(value, async_op=True).wait

    def reduce_scatter(self, own: Tensor, value: Tensor) -> None:
        """own (n,) = this process's part of the sum of all values (size n,)."""
        _reduce_scatter(own, value)

    def all_gather(self, value: Tensor, own: Tensor) -> None:
        """value (size n,) = the own (n,) of all processes in their order."""
        _all_gather(value, own)

    def broadcast(self, value: Tensor) -> None:
        """Replaces a tensor by that of process 0."""
        dist.broadcast(value, 0)


class MpiCollectives(Collectives):
    """By MPI, through memory of the CPU; tensors of a GPU go through NCCL, or where that is missing are copied there.

    Args:
        device: of the weights.

    MPI is initialised unless the script has done so, by mpi4py for one. Before Python ends a process waits for the
    others to do so too, so that one that ends early is known to them, and ends them.

    Raises:
        RuntimeError: this build has no MPI, or MPI cannot be initialised.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            found = _C.mpi_open()
        except OSError as error:
            raise RuntimeError(f"mpirun started this process, but MPI cannot be used: {error}. Build onnxtrain with "
                               "mpicc installed (ONNXTRAIN_MPI=1), or start the script by torchrun") from error
        self.rank, self.size = found["rank"], found["size"]
        self._worker: ThreadPoolExecutor | None = None  # all-reduces one after the other, beside backward
        atexit.unregister(_C.mpi_leave)
        atexit.register(_C.mpi_leave)
        self._nccl = _nccl.meet(_nccl.place_of(device), self.rank, self.size)

    def _run(self, kind: str, source: Tensor, target: Tensor, by_mpi: Callable[[Tensor], None]) -> None:
        """Enqueues a collective of NCCL; else MPI makes the result in memory of the CPU."""
        if self._nccl is not None and self._nccl.takes(source):
            self._nccl.run(kind, source, target)
            return
        host = _on_cpu(target)
        by_mpi(host)
        if target.device.type != "cpu":
            target.detach().copy_(host)

    def all_reduce(self, value: Tensor) -> None:
        self._run("all_reduce", value, value, _C.mpi_all_reduce)

    def start_all_reduce(self, value: Tensor) -> Callable[[], object]:
        if self._nccl is not None and self._nccl.takes(value):
            self._nccl.run("all_reduce", value, value)
            return self._nccl.check
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "onnxtrain_reduce")
        return self._worker.submit(self.all_reduce, value).result

    def reduce_scatter(self, own: Tensor, value: Tensor) -> None:
        self._run("reduce_scatter", value, own, lambda host: _C.mpi_reduce_scatter(host, _on_cpu(value)))

    def all_gather(self, value: Tensor, own: Tensor) -> None:
        self._run("all_gather", own, value, lambda host: _C.mpi_all_gather(host, _on_cpu(own)))

    def broadcast(self, value: Tensor) -> None:
        self._run("broadcast", value, value, lambda host: _C.mpi_broadcast(host, 0))


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach() if value.device.type == "cpu" else value.detach().cpu()
