"""What an export holds for: the schema of a call and torch's modes; and the calls that are known to run in PyTorch.

Made by _module.py at every call, so every microsecond here is one of a step's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from onnxtrain._export.attributes import State
from onnxtrain._export.errors import Changed
from onnxtrain.export import PLAIN_TENSORS

MAX_TRIES = 3  # of an export that failed, each after a change of the module


class Key(NamedTuple):
    """What a program was exported for; sizes are the guards' business, the module's own state is State's."""

    schema: tuple[Any, ...]  # per leaf: (dtype, ndim, device type), or the value of what is no tensor
    spec: pytree.TreeSpec | None  # None: positional tensors only
    training: bool
    torch_modes: tuple[Any, ...]  # autocast, default dtype, determinism


class Fallen(NamedTuple):
    """Why a signature runs in PyTorch."""

    reason: str
    state: State | None  # where it has changed, the export is tried again
    tries: int

    def holds(self) -> bool:
        return self.state is None or self.tries >= MAX_TRIES or self.state.difference() is None


class SetUps:
    """Calls that ran in PyTorch since forward changed what a graph could not: it may do so at a first call alone.

    The next call with these sizes tells: a module that changes again does so at every call, and falls back.
    """

    def __init__(self) -> None:
        self._had: set[tuple[Key, Any]] = set()

    def admit(self, sizes: tuple[Key, Any], failures: list[tuple[str, Exception]]) -> Changed | None:
        """What forward changes, where a call of this key and these sizes may run so; None where it may not."""
        change = next((error.__cause__ for _, error in failures if isinstance(error.__cause__, Changed)), None)
        if change is None or sizes in self._had or sum([key == sizes[0] for key, _ in self._had]) >= MAX_TRIES:
            return None
        self._had.add(sizes)
        return change


def describe(leaf: Any) -> Any:
    """What of one argument goes into the schema."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is torch.strided and type(leaf) in PLAIN_TENSORS and not leaf.is_nested:
            return leaf.dtype, leaf.ndim, leaf.device.type
        return leaf.dtype, leaf.dim(), leaf.device.type, type(leaf), leaf.layout, leaf.is_nested
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf  # -0.0 is not 0.0, NaN is NaN


def torch_modes() -> tuple[Any, ...]:
    """What of torch's global state goes into a graph."""
    return (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"), torch.get_default_dtype(), torch._C._get_deterministic_algorithms())


def function_mode() -> str | None:
    """The name of a TorchFunctionMode that is on, but for torch.set_default_device()'s, which a trace sees."""
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return next((type(mode).__qualname__ for mode in modes if type(mode) is not DeviceContext), None)
