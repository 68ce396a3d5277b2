"""What an export holds for: the schema of a call and torch's modes.

Made by _runner.py for a call of a schema that it has not seen, and compared at every other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onnxtrain import _torch
from onnxtrain._export.exported import PLAIN_TENSORS

_FORWARD_AD_LEVEL: Any = _torch.place("forward_ad_level")
Modes = tuple[bool, torch.dtype, bool, torch.dtype, torch.dtype, object]  # autocast twice, default, determinism


class Key(NamedTuple):
    """What a program was exported for; sizes are the guards' business."""

    schema: tuple[object, ...]  # per argument: (dtype, ndim, device), or the value of a number
    training: bool
    torch_modes: Modes  # autocast, default dtype, determinism


def describe(leaf: object) -> tuple[object, ...]:
    """What of one argument goes into the schema."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is torch.strided and type(leaf) in PLAIN_TENSORS and not leaf.is_nested:
            return leaf.dtype, leaf.ndim, leaf.device
        return leaf.dtype, leaf.dim(), leaf.device, type(leaf), leaf.layout, leaf.is_nested
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf  # -0.0 is not 0.0, NaN is NaN


def torch_modes() -> Modes | None:
    """What of torch's global state goes into a graph; None where a mode is active that must see every operator."""
    if (_torch.are_functorch_transforms_active() or _torch.len_torch_dispatch_stack()
            or _torch.get_tracing_state() is not None or getattr(*_FORWARD_AD_LEVEL) >= 0):
        return None
    return (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"), torch.get_default_dtype(), _torch.get_deterministic_algorithms())


def is_transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return bool(_torch.are_functorch_transforms_active())


def function_mode() -> str | None:
    """The name of a TorchFunctionMode that is on, but for torch.set_default_device()'s, which a trace sees."""
    modes = [_torch.get_function_stack_at(i) for i in range(_torch.len_torch_function_stack())]
    return next((type(mode).__qualname__ for mode in modes if type(mode) is not _torch.DeviceContext), None)
