"""`onnxruntime.capi._pybind_state`: the functions that samples of the old trainers call."""

from __future__ import annotations

import enum
import logging

import torch

from onnxtrain.ortmodule.experimental.json_config import PropagateCastOpsStrategy
from onnxtrain.training._collectives import local_rank as get_mpi_context_local_rank
from onnxtrain.training._collectives import local_size as get_mpi_context_local_size
from onnxtrain.training._collectives import world_rank as get_mpi_context_world_rank
from onnxtrain.training._collectives import world_size as get_mpi_context_world_size

__all__ = ["ArenaExtendStrategy", "PropagateCastOpsStrategy", "get_mpi_context_local_rank",
           "get_mpi_context_local_size", "get_mpi_context_world_rank", "get_mpi_context_world_size",
           "set_arena_extend_strategy", "set_cuda_device_id", "set_cuda_mem_limit", "set_seed"]

_log = logging.getLogger("onnxtrain")


class ArenaExtendStrategy(enum.IntEnum):
    """Kept for scripts that name it."""

    kNextPowerOfTwo = 0
    kSameAsRequested = 1


def set_seed(seed: int) -> None:
    """Seeds what the engine draws from: torch's generators."""
    torch.manual_seed(seed)


def set_cuda_device_id(device_id: int) -> None:
    """Makes that GPU torch's current one, which "cuda" stands for. Without CUDA there is nothing to set."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device_id)


def set_cuda_mem_limit(limit: int) -> None:
    """Limits torch's allocator on the current GPU, whose memory the engine uses.

    Args:
        limit: bytes; 0 or less, or more than the GPU has: all of it.
    """
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total) if limit > 0 else 1.0)


def set_arena_extend_strategy(strategy: object) -> None:
    """Warns that it has no effect: memory is planned, or is torch's."""
    _log.warning("set_arena_extend_strategy has no effect in onnxtrain: memory is planned")
