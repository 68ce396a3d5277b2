"""Leaves a module, the random generators and torch's switches exactly as they were before an export.

Called by export.py around every trace. Tracing runs the user's forward on fake tensors: whatever it stores on the
module (a cached mask, a counter, a list of activations) would otherwise stay there as a fake tensor.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from onnxtrain._export import exclusive
from onnxtrain._export.errors import Changed, Untraceable
from onnxtrain._export.snapshot import Change, Snapshot, repr_of


@contextlib.contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Restores `module` and all plain objects that it leads to: attributes, registries, hooks, helpers, caches; and the
    contents of tensors that are no buffers, which torch.export changes where forward does.
    """
    before, buffers = Snapshot(module), {id(buffer) for buffer in module.buffers()}
    contents = [(tensor, tensor._version, tensor.detach().clone()) for tensor in before.tensors()
                if id(tensor) not in buffers and not tensor.is_inference()]
    try:
        yield
    finally:
        before.restore()
        with torch.no_grad():
            for tensor, version, content in contents:
                if tensor._version != version:
                    tensor.copy_(content)


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


# torch's own lists of a module's parameters, which follow the parameters by themselves
_FOLLOWS = {"_flat_weights", "_flat_weight_refs"}


def follows_parameters(child: Any, name: str) -> bool:
    """Whether the attribute only lists parameters: forward brings it up to date, which is no change of the module."""
    return isinstance(child, torch.nn.RNNBase) and name in _FOLLOWS


@contextlib.contextmanager
def nothing_lost(module: torch.nn.Module, writes: Mapping[tuple[Any, str], Any],
                 settings: list[Setting]) -> Iterator[None]:
    """Refuses a forward that changes what a graph could not change at each step.

    Args:
        writes: (module, attribute) pairs that forward has assigned, filled meanwhile: these are the caller's business.
        settings: filled with plain values that it has given to objects that are no modules, as `config.kind = "a"`.

    Raises:
        Untraceable: it draws from a generator that is not torch's own; a trace freezes the number drawn. Or it seeds
            torch's own, or sets its state.
        Changed: it changes a container, an object, hooks, or a module that is not part of `module`.
    """
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numbers = None if numpy is None else repr_of(numpy.random.get_state())
    before, children = Snapshot(module, follows_parameters), set(module.modules())
    with replaced(torch.random, "default_generator", _NotSeeded(torch.random.default_generator)):
        yield
    drawn = ["Python's random"] if random.getstate() != python else []
    if numpy is not None and numbers is not None and repr_of(numpy.random.get_state()) != numbers:
        drawn.append("numpy.random")
    changes = before.changes()
    drawn += [f"its own generator {change.path!r}" for change in changes if change.draws]
    if drawn:
        raise Untraceable(f"The module draws from {' and '.join(drawn)} inside forward; a graph would freeze the "
                          "number.")
    for change in changes:
        if lost := [key for key in change.keys if not _is_assigned(change, key, writes, children)]:
            change.keys = lost
            if (found := change.settings()) is None:
                what = f"its {change.kind} {change.place(lost[0])!r}"
                raise Changed(f"The module changes {what} in place inside forward; a graph would lose that.")
            settings += [Setting(*setting, change.place(setting[1])) for setting in found]


class _NotSeeded:
    """torch's generator of the CPU, as torch.manual_seed and the like find it; torch's tracers put back its state."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        seeds = name in ("manual_seed", "seed", "set_state") and exclusive.here()
        if seeds and not sys._getframe(2).f_globals.get("__name__", "").startswith("torch._"):
            raise Untraceable("The module seeds torch's random generator, or sets its state, inside forward; a graph "
                              "would draw on from the caller's.")
        return getattr(self._generator, name)


class Setting(NamedTuple):
    """A plain value that forward has given to an attribute of an object that is no module."""

    attributes: dict[str, Any]
    name: str
    value: Any
    place: str

    def apply(self) -> None:
        """Gives it that value for good."""
        self.attributes[self.name] = self.value


def _is_assigned(change: Change, key: Any, writes: Mapping[tuple[Any, str], Any], children: set[Any]) -> bool:
    """Whether it is an attribute of the module's own that was set in the way that is recorded, or a buffer."""
    if change.owner not in children if isinstance(change.owner, torch.nn.Module) else True:
        return False
    if change.store == "_buffers":
        return True  # each is an output
    return (change.owner, key) in writes or change.store is None and follows_parameters(change.owner, key)


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
