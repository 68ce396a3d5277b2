"""Leaves a module, the random generators and torch's switches exactly as they were before an export.

Called by export.py around every trace. Tracing runs the user's forward on fake tensors: whatever it stores on the
module (a cached mask, a counter, a list of activations) would otherwise stay there as a fake tensor.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from onnxtrain._export.errors import Untraceable

_CONTAINERS = (dict, list, set)


def _copy(value: Any) -> Any:
    """A shallow copy of a plain container, enough to undo append, item assignment and clear."""
    return value.copy() if isinstance(value, _CONTAINERS) else value


def _restore_container(target: Any, saved: Any) -> None:
    """Puts the saved items back into the same object, which others may hold."""
    if isinstance(target, list):
        target[:] = saved
    else:
        target.clear()
        target.update(saved)


@contextlib.contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Restores attributes, parameters, buffers, submodules and training flags of `module` and everything below it."""
    saved: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
    for child in module.modules():
        attributes = dict(child.__dict__)
        contents = {name: _copy(value) for name, value in attributes.items() if isinstance(value, _CONTAINERS)}
        saved.append((child, attributes, contents))
    try:
        yield
    finally:
        for child, attributes, contents in saved:
            child.__dict__.clear()
            child.__dict__.update(attributes)
            for name, items in contents.items():
                _restore_container(attributes[name], items)


@contextlib.contextmanager
def random_unchanged() -> Iterator[None]:
    """Restores Python's, NumPy's, torch's CPU and, where it is in use, CUDA's random state."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


@contextlib.contextmanager
def no_hidden_draws() -> Iterator[None]:
    """Refuses a forward that draws from Python's or NumPy's generator: a trace freezes the number drawn."""
    numpy = sys.modules.get("numpy")
    python_before, before = random.getstate(), None if numpy is None else numpy.random.get_state()
    yield
    drawn = ["Python's random"] if random.getstate() != python_before else []
    if before is not None:
        after = numpy.random.get_state()
        if after[2] != before[2] or (after[1] != before[1]).any() or after[3:] != before[3:]:
            drawn.append("numpy.random")
    if drawn:
        raise Untraceable(f"The module draws from {' and '.join(drawn)} inside forward; a graph would freeze the "
                          "number.")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute for a while; one that `owner` only inherited is removed again."""
    own = name in vars(owner)
    saved = vars(owner)[name] if own else None
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, saved)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def private_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Runs on copies of the buffers, for an exporter that really executes forward; enter it inside unchanged()."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.detach().clone()
    yield
