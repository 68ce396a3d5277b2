"""Methods of a module beside forward that run in the engine: ORTModule(model, methods=("evaluate_actions",)).

Each is the forward of a module of its own, which an ORTModule of its own runs. Called by ORTModule.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable
from typing import Any

import torch

NOTED = 20  # calls of one method, before the first one of forward, after which it is named once


class Method(torch.nn.Module):
    """A method of a module, as a module."""

    def __init__(self, of: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.of, self._method = of, name

    @property
    def training(self) -> bool:
        return self.of.training if "of" in self._modules else True

    @training.setter
    def training(self, mode: bool) -> None:
        """The module's own, which train() sets."""

    def forward(self, *args: Any, **kwargs: Any) -> object:
        return getattr(self.of, self._method)(*args, **kwargs)


def made(model: Any, names: str | Iterable[str]) -> dict[str, Any]:
    """For each method's name an ORTModule, which counts its steps as the model's.

    Raises:
        ValueError: the module has no such method.
    """
    module, found = model._module, {}
    for name in (names,) if isinstance(names, str) else names:
        if not isinstance(getattr(module, name, None), types.MethodType):
            own = sorted(key for base in type(module).__mro__[:-1] if base.__module__.split(".")[0] != "torch"
                         for key, value in vars(base).items()
                         if isinstance(value, types.FunctionType) and not key.startswith("_"))
            raise ValueError(f"methods= names {name!r}, which is no method of {type(module).__name__}; its methods are "
                             f"{', '.join(own)}")
        if name != "forward":
            kind = type(f"{type(module).__name__}.{name}", (Method,), {})
            plain = getattr(type(model), "_plain_class", type(model))
            found[name] = plain(kind(module, name), model._debug, outputs=())
            found[name]._counters = model._counters
    return found


def note(model: Any, name: str) -> None:
    """Says once that a method is called NOTED times before forward: PyTorch runs it, and no count shows it."""
    counters = model._counters
    seen = counters.methods
    if seen is None or counters.engine_steps or counters.fallback_steps or name.startswith("_") or not (
            model._module.training):
        return
    seen[name] = seen.get(name, 0) + 1
    if seen[name] == NOTED:
        counters.methods = None
        model._debug.log(
            logging.WARNING, "ORTModule: forward of %s has not been called yet, but %s has, %d times: PyTorch runs it. "
            "ORTModule(model, methods=(%r,)) runs it in the engine", type(model._module).__name__, name, NOTED, name)
