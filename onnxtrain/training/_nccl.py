"""Collectives of tensors on a CUDA device by NCCL, between processes that have met by MPI.

Used by _collectives.py. Work is enqueued on the device's current stream, and nothing waits for it. Before each call the
processes tell each other by MPI which one follows: where they differ, or one has ended, NCCL would wait for ever.
"""

from __future__ import annotations

import atexit
import logging

import torch
from torch import Tensor

from onnxtrain import _C, UnsupportedError

_log = logging.getLogger("onnxtrain")
_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
           torch.uint8, torch.bool)  # which NCCL has


def place_of(device: torch.device) -> str:
    """The core's name of a CUDA device; "" is the CPU."""
    if device.type != "cuda":
        return ""
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def is_there(value: Tensor) -> bool:
    """Whether a tensor is on a CUDA device."""
    return value.is_cuda


def meet(place: str, rank: int, size: int) -> Nccl | None:
    """The communicator of all processes; None where they train on the CPU, or where one of them cannot have it, which a
    warning says. All processes call it; later calls return the same one.

    Args:
        place: the device of this process's weights.
    """
    reason = "the weights are on the CPU" if not place else ""
    try:
        about = _C.comm_about(place) if place else ""
    except UnsupportedError as error:
        reason = str(error)
    known = _made.get(place)
    able, wanted, kept = _sums(not reason, bool(place), known is not None and not known.failed)
    if not wanted:
        return None
    if kept == size:
        return known
    if able < size:
        _say(reason or "another process has no NCCL, or its weights are on the CPU")
        return None
    told = torch.zeros(128, dtype=torch.uint8)
    try:
        if rank == 0:
            told = torch.frombuffer(bytearray(_C.comm_id(place)), dtype=torch.uint8)
    except RuntimeError as error:
        reason = str(error)
    if _sums(bool(reason))[0]:
        _say(reason or "process 0 has no id for the others")
        return None
    _C.mpi_broadcast(told, 0)
    comm = None
    try:
        comm = _C.comm_open(place, bytes(told.tolist()), rank, size)
    except RuntimeError as error:
        reason = str(error)
    if _sums(comm is not None)[0] < size:
        if comm is not None:
            _C.comm_close(comm, True)
        _say(reason or "another process has no communicator")
        return None
    _log.info("ORTTrainer: process %d of %d sends tensors of %s by %s", rank, size, place, about)
    found = _made[place] = Nccl(comm, size)
    return found


_made: dict[str, Nccl] = {}  # by device


def _sums(*flags: bool) -> list[int]:
    """Of each flag, how many processes have it set."""
    counts = torch.tensor(flags, dtype=torch.int32)
    _C.mpi_all_reduce(counts)
    return counts.tolist()


def _say(reason: str) -> None:
    _log.warning("ORTTrainer: gradients go through the memory of the CPU, which is slow, because %s", reason)


class Nccl:
    """All processes, each with one device. meet() makes it.

    Args:
        comm: of _C.comm_open(). size: how many processes there are.

    Attributes:
        failed: whether a call has failed, so that the others may wait for ever.
    """

    def __init__(self, comm: object, size: int) -> None:
        self._comm, self._size = comm, size
        self.failed = False
        atexit.register(self._close)  # before MPI's

    def takes(self, value: Tensor) -> bool:
        """Whether run() takes a tensor; else MPI does."""
        return is_there(value) and value.dtype in _DTYPES

    def run(self, kind: str, source: Tensor, target: Tensor) -> None:
        """Enqueues a collective; a broadcast is process 0's.

        Raises:
            RuntimeError: another process has ended, or makes another call; NCCL has failed.
        """
        try:
            self._agree(kind, source)
            _C.comm_enqueue(self._comm, kind, source.detach(), target.detach())
        except RuntimeError:
            self.failed = True
            raise

    def check(self) -> None:
        """Raises RuntimeError where NCCL has failed meanwhile."""
        _C.comm_check(self._comm)

    def _agree(self, kind: str, source: Tensor) -> None:
        own = torch.tensor([_KINDS.index(kind), _DTYPES.index(source.dtype), source.numel()])
        found = own.new_empty(self._size * 3)
        _C.mpi_all_gather(found, own)
        calls = found.view(-1, 3).tolist()
        if any(call != calls[0] for call in calls):
            said = [f"rank {rank} calls {_KINDS[which]} of {count} numbers of {_DTYPES[dtype]}"
                    for rank, (which, dtype, count) in enumerate(calls)]
            raise RuntimeError(f"the processes differ: {', '.join(said)}")

    def _close(self) -> None:
        _C.comm_close(self._comm, self.failed)
