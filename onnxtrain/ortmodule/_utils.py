"""Devices and random states, by the names that scripts import; and what Dynamo leaves alone."""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain._export.state import get_random_states as get_random_states
from onnxtrain._export.state import set_random_states as set_random_states
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


def leave_alone(function: Any) -> None:
    """Makes torch.compile skip this function and its callees: around an ORTModule it compiles the rest of a model."""
    function._torchdynamo_disable = True
    skip = FrameAction.SKIP  # torch's own switch of a frame, without importing its compiler
    set_code_exec_strategy(function.__code__, FrameExecStrategy(skip, skip))
