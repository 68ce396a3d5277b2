"""Devices and random states, by the names that scripts import; and what Dynamo leaves alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from onnxtrain._torch import FrameAction, FrameExecStrategy, set_code_exec_strategy


def get_device_index(device: str | int | torch.device) -> int:
    """Its number; 0 where it has none on the CPU, the current one otherwise."""
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.index is not None:
        return device.index
    return 0 if device.type == "cpu" else torch.cuda.current_device()


def get_device_str(device: str | int | torch.device) -> str:
    """As "cpu" or "cuda:1"."""
    if isinstance(device, int):
        return f"cuda:{device}"
    device = torch.device(device)
    return "cpu" if device.type == "cpu" else f"{device.type}:{get_device_index(device)}"


def get_random_states() -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
    """Of Python, NumPy, torch's CPU and, where it is in use, CUDA."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: tuple[Any, Any, torch.Tensor, torch.Tensor | None]) -> None:
    """Puts back what get_random_states() gave."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def leave_alone(function: Any) -> None:
    """Makes torch.compile skip this function and its callees: around an ORTModule it compiles the rest of a model."""
    function._torchdynamo_disable = True
    skip = FrameAction.SKIP  # torch's own switch of a frame, without importing its compiler
    set_code_exec_strategy(function.__code__, FrameExecStrategy(skip, skip))
