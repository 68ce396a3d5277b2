"""Gradients that scripts register for ATen operators: kept, and not needed, since the engine has gradients of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REGISTERED: dict[tuple[str, ...], Callable[..., Any]] = {}


def register_gradient(domain: str, name: str, *attributes: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that keeps a gradient's definition under (domain, name, *attributes).

    The engine differentiates by its own rules, and runs what it does not have in PyTorch with PyTorch's gradient.
    """

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        REGISTERED[(domain, name, *attributes)] = function
        return function

    return keep
