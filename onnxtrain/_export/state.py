"""Leaves a module, the random generators and torch's switches as they were, whatever runs or is traced meanwhile.

Called by export.py around every trace, and around runs of a graph or module for comparison.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Restores the attributes of `module` and its parts, and the dicts among them: parameters, buffers, modules, hooks.
    """
    held = [(values, dict(values)) for child in module.modules()
            for values in (child.__dict__, *[value for value in child.__dict__.values() if isinstance(value, dict)])]
    try:
        yield
    finally:
        for values, before in held:
            values.clear()
            values.update(before)


@contextlib.contextmanager
def random_unchanged() -> Iterator[None]:
    """Restores Python's, NumPy's, torch's CPU and, where it is in use, CUDA's random state."""
    python_state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
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
def autocast_unchanged() -> Iterator[None]:
    """Leaves the regions of autocast that a graph of Dynamo's has entered and, where its trace failed, not left."""
    devices = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
               for device in ("cpu", "cuda")]
    caches, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()
    try:
        yield
    finally:
        for device, enabled, dtype in devices:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(caches)
        while (left := torch.autocast_decrement_nesting()) >= depth:
            pass
        if not left:
            torch.clear_autocast_cache()


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
    """Runs on copies of the buffers, where forward is really executed; enter it inside unchanged()."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.detach().clone()
    yield
