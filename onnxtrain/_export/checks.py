"""What has to hold for the bounds of sizes made of contents, `x.narrow(0, 0, int(n))`: what the graph makes of a
negative one is empty, where torch raises.

Each is a further output of the graph; a step where one does not hold runs in PyTorch, which raises. Used by rewrite.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxtrain._export import packed_sequences
from onnxtrain._torch import assert_async


def _number(x: Any) -> Tensor:
    return torch.scalar_tensor(x, dtype=torch.int64)


def _narrow(input: Tensor, dim: int, start: Any, length: Any) -> Tensor:
    size, first, count = (_number(x) for x in (input.shape[dim], start, length))
    first = torch.where(first < 0, first + size, first)
    return (count >= 0) & (first >= 0) & (first + count <= size)


def _arange(*bounds: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: object) -> Tensor:
    if len(bounds) == 1:
        bounds = (start, *bounds)
    first, last, by = (*bounds, *(start, end, step)[len(bounds):])
    return (_number(last) - _number(first)) * _number(by).sign() >= 0


def _eye(n: Any, m: Any = 0, **_: object) -> Tensor:
    return (_number(n) >= 0) & (_number(m) >= 0)


def _holds(condition: Tensor, _: str = "") -> Tensor:
    return condition.detach().reshape(()) != 0


_SIZED: dict[object, Callable[..., Tensor]] = {torch.narrow: _narrow, Tensor.narrow: _narrow, torch.arange: _arange,
                                            torch.eye: _eye}


def of_sizes(function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What has to hold for torch not to raise in this call, where it takes whole numbers made of contents."""
    if function is assert_async:
        return _holds(*args, **kwargs)
    if function in packed_sequences.CHECKS:
        return packed_sequences.CHECKS[function](*args, **kwargs)
    condition = _SIZED.get(function)
    if condition is None:
        return None
    numbers = (*args[function is not torch.arange and function is not torch.eye:], *kwargs.values())
    if any(isinstance(x, (float, torch.SymFloat, Tensor)) for x in numbers):
        return None
    made = any(isinstance(x, torch.SymInt) and free_unbacked_symbols(x) for x in numbers)
    return condition(*args, **kwargs) if made else None
