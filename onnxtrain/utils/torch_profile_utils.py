"""Marks for profilers, and lines of memory, around the phases of a training step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch


def torch_nvtx_range_push(msg: str) -> None:
    """Begins a range of this name in NVIDIA's profiler; nothing where torch has no CUDA device."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)


def torch_nvtx_range_pop() -> None:
    """Ends the latest range."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def log_memory_usage(cur_phase: str, rank_0_only: bool = True, step_info: str = "",
                     logger: logging.Logger | None = None, module: torch.nn.Module | None = None) -> None:
    """Logs one line of memory, in MiB: of CUDA, where torch has a device, else the process's resident memory.

    Args:
        cur_phase: a name for the line.
        rank_0_only: whether processes of torch.distributed other than the first one log nothing.
        step_info: put in front.
        logger: gets the line at level INFO; None: it is printed.
        module: the line has the size of its parameters, gradients and buffers, too.
    """
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank_0_only and ranks and torch.distributed.get_rank() != 0:
        return
    if torch.cuda.is_available():
        figures = {"allocated": torch.cuda.memory_allocated(), "max allocated": torch.cuda.max_memory_allocated(),
                   "cached": torch.cuda.memory_reserved(), "max cached": torch.cuda.max_memory_reserved()}
    else:
        figures = memory_of_the_process()
    if module is not None:
        parameters = list(module.parameters())
        figures["parameters"] = _bytes(parameters)
        figures["gradients"] = _bytes(p.grad for p in parameters if p.grad is not None)
        figures["buffers"] = _bytes(module.buffers())
    texts = [f"{name}: {value / 2**20:.0f}" for name, value in figures.items()]
    line = f"{step_info} memory (MiB) | phase: {cur_phase} | {' | '.join(texts)}".strip()
    if logger is None:
        print(line)
    else:
        logger.info(line)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memory_of_the_process() -> dict[str, int]:
    """Bytes that are "resident" now, and the "max resident" there were, as Linux counts them."""
    names = {"VmRSS": "resident", "VmHWM": "max resident"}
    lines = [line.split() for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()]
    return {names[line[0][:-1]]: int(line[1]) * 1024 for line in lines if line[0][:-1] in names}
