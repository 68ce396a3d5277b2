"""Leaves a module, the random generators and torch's switches as they were, whatever runs or is traced meanwhile.

Called by export.py around every trace, around runs of a graph or module for comparison, and by all that replaces a name
of torch for a while.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
import random
import threading
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch

from onnxtrain import _torch


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


def get_random_states() -> tuple[object, object, torch.Tensor, list[torch.Tensor] | None]:
    """Of Python, NumPy, torch's CPU and, where it is in use, each device of CUDA."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: tuple[Any, Any, torch.Tensor, list[torch.Tensor] | None]) -> None:
    """Puts back what get_random_states() gave."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def random_unchanged() -> Iterator[None]:
    """Restores the random states."""
    states = get_random_states()
    try:
        yield
    finally:
        set_random_states(states)


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


class _Place:
    """An attribute of torch's, or of a module, that threads replace for a while; the last one puts back what was there.

    A function is called by the threads that have put it there, and all others call the one that was there before; for
    what is not called, the value of the last one holds everywhere.

    Attributes:
        values: what each thread has put there, the innermost last.
        before: what other threads call.
    """

    def __init__(self, owner: Any, name: str, value: object) -> None:
        self._owner, self._name = owner, name
        self._own = name in vars(owner)
        self._raw = inspect.getattr_static(owner, name) if isinstance(owner, type) else vars(owner).get(name)
        kinds = [type(each) for each in (self._raw, value) if isinstance(each, (staticmethod, classmethod))]
        self._kind = kinds[0] if kinds else None
        self._is_called = self._kind is not None or callable(value) and not isinstance(value, type)
        self.values: dict[int, list[Any]] = {}
        self.before: Any = getattr(owner, name)
        if self._is_called and isinstance(owner, type) and self._kind is not staticmethod:  # it gets self
            self.before = getattr(self._raw, "__func__", None) or (
                self._raw if self._kind is None else lambda cls, *args, **kwargs: self._raw.__get__(None, cls)(
                    *args, **kwargs))

    def put(self, value: object) -> None:
        """For this thread."""
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        self.values.setdefault(threading.get_ident(), []).append(value)
        if not self._is_called:
            setattr(self._owner, self._name, value)
        elif len(self.values) == 1 and len(next(iter(self.values.values()))) == 1:
            values, before = self.values, self.before

            def choose(*args: object, **kwargs: object) -> object:
                mine = values.get(threading.get_ident())
                return (mine[-1] if mine else before)(*args, **kwargs)

            setattr(self._owner, self._name, choose if self._kind is None else self._kind(choose))

    def take(self, thread: int) -> bool:
        """Takes the last value of a thread away; returns whether no thread has one any longer."""
        self.values[thread].pop()
        if not self.values[thread]:
            del self.values[thread]
        if self.values:
            if not self._is_called:
                setattr(self._owner, self._name, [*self.values.values()][-1][-1])
        elif self._own:
            setattr(self._owner, self._name, self._raw)
        else:
            delattr(self._owner, self._name)
        return not self.values


_places: dict[tuple[int, str], _Place] = {}
_lock = threading.Lock()
observer: Callable[[str, object], object] | None = None  # of tests: given a name and a value, it says what is put there


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets an attribute for a while; a function is put there for this thread alone. All that onnxtrain replaces for a
    while goes through here, so that any number of threads leave torch as it was, in whatever order they end.
    """
    if observer is not None:
        value = observer(f"{getattr(owner, '__qualname__', getattr(owner, '__name__', type(owner).__name__))}.{name}",
                         value)
    key, thread = (id(owner), name), threading.get_ident()
    with _lock:
        place = _places.get(key)
        if place is None:
            place = _places[key] = _Place(owner, name, value)
        place.put(value)
    try:
        yield
    finally:
        with _lock:
            if place.take(thread):
                del _places[key]


def in_force(owner: object, name: str) -> Any:
    """What this thread calls by this name now, as replaced() takes it: of a class, a function that is given self, or
    the class where it is a class method.
    """
    with _lock:
        place = _places.get((id(owner), name))
        mine = place.values.get(threading.get_ident()) if place is not None else None
        if place is not None:
            return mine[-1] if mine else place.before
    found = getattr(owner, name)
    return found.__func__ if isinstance(found, types.MethodType) and isinstance(owner, type) else found


@contextlib.contextmanager
def wrapped(name: str, wrap: Callable[[Any], object]) -> Iterator[None]:
    """replaced() by what `wrap` makes of the function that is there.

    Args:
        name: a short one of onnxtrain/_torch.py. Nothing is replaced where PyTorch is left alone at it.
    """
    place = _torch.place(name)
    if place is None:
        yield
        return
    with replaced(*place, wrap(in_force(*place))):
        yield


@contextlib.contextmanager
def settings(config: Any, **values: object) -> Iterator[None]:
    """config.patch() of those that this torch has. In torch 2.10 settings hold for all threads, so that they are
    replaced as other names are.
    """
    known = {name: value for name, value in values.items() if hasattr(config, name)}
    if all(isinstance(config._config[name].user_override, contextvars.ContextVar) for name in known):
        with config.patch(known):
            yield
        return
    with contextlib.ExitStack() as stack:
        for name, value in known.items():
            stack.enter_context(replaced(config._config[name], "user_override", value))
        config._is_dirty = True
        yield
    config._is_dirty = True


def _after_fork() -> None:
    """Other threads are not in the child: what they had replaced is put back."""
    global _lock
    _lock, _torch._lock = threading.Lock(), threading.RLock()
    here = threading.get_ident()
    for key, place in [*_places.items()]:
        for thread in [thread for thread in place.values if thread != here]:
            while thread in place.values:
                if place.take(thread):
                    del _places[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def private_buffers(module: torch.nn.Module, parameters: Collection[str] = ()) -> Iterator[None]:
    """Runs on copies of the buffers, and of the frozen parameters of these names, where forward is really executed;
    enter it inside unchanged().
    """
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.detach().clone()
        for name, parameter in child._parameters.items():
            if parameter is not None and f"{path}.{name}".lstrip(".") in parameters:
                child._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    yield
