"""The call of an ORTModule that goes on in each thread, as its graphs and what serves them ask for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from onnxtrain._torch import pytree
from onnxtrain.ortmodule._device import names_of
from onnxtrain.ortmodule._key import describe

if TYPE_CHECKING:
    from onnxtrain.ortmodule._captured import _Call


class Running(threading.local):
    """The call of each thread that goes on: of _captured.py, whose captures it hears of."""

    call: _Call | None = None

    def capture_begins(self, _: object = None) -> None:
        """Dynamo begins a capture, of whatever module."""
        if self.call is not None:
            self.call.capture_begins()

    def capture_ends(self, _: object = None) -> None:
        """A capture is over, whether it succeeded or not."""
        if self.call is not None:
            self.call.capture_ends()


running = Running()


def kind_of(args: tuple[object, ...], kwargs: dict[str, object], sizes: bool = False) -> tuple[object, ...]:
    """What tells calls apart that Dynamo may or may not follow, or, with sizes, that forward may refuse."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    found: tuple[tuple[object, ...], object]
    found = tuple([describe(leaf) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves]), spec
    if sizes:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found = (*found[0], *[None if tensor.is_nested else tensor.shape for tensor in tensors]), spec
    try:
        hash(found)
    except TypeError:  # a spec may have a context without one
        found = found[0], str(spec)
    return found


def kind_of_call() -> tuple[object, ...] | None:
    """Of the arguments of the module's call: dtype, number of dimensions and device of the tensors, types of the
    others, and how they are nested.
    """
    return None if running.call is None else kind_of(running.call.args, running.call.kwargs)


def is_cut() -> bool:
    """Whether the module's call has been captured in parts."""
    call = running.call
    return call is not None and bool(call.cuts or call.new_cuts())


def names_of_call() -> dict[int, str]:
    """_device.names_of() of the module's call."""
    call = running.call
    return {} if call is None else names_of(call.model._module.forward, call.args, call.kwargs)
