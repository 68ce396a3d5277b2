"""Raises errors for what a trace would drop or freeze silently. export.py calls it before a trace.

Hooks that a forward itself registers, at its first call, are part of that forward: ORTModule notes them here.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import enum
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from onnxtrain._export.captured import Graph
from onnxtrain._export.errors import ArgumentError, ExportError

PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))
PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, torch.dtype, torch.device,
         torch.layout, torch.memory_format, type)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                 "_global_backward_pre_hooks")
_own_hooks: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def noting_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Around a forward in PyTorch: the hooks that it registers on parts of `module` are its own.

    torch counts hooks up, so that a call that registers none costs a comparison.
    """
    before = RemovableHandle.next_id
    yield
    if RemovableHandle.next_id == before:
        return
    for child in module.modules():
        for hooks in (child._forward_hooks, child._forward_pre_hooks):
            for number, hook in hooks.items():
                if number >= before:
                    with contextlib.suppress(TypeError):  # what can have no weak reference is refused later
                        _own_hooks.add(hook)


def is_plain(leaf: Any) -> bool:
    """Whether a graph may hold a value as a constant: numbers, names, and functions without state."""
    if isinstance(leaf, types.FunctionType):
        return not leaf.__closure__
    if isinstance(leaf, types.BuiltinFunctionType):
        return leaf.__self__ is None or isinstance(leaf.__self__, (types.ModuleType, type))
    return isinstance(leaf, PLAIN)


_HARMLESS = (isinstance, len, type, tuple, list, dict, int, float, bool, getattr, hasattr, zip, range, min, max)


def _touches_arguments_only(hook: Any) -> bool:
    """Whether a function names nothing but its arguments: a trace sees all that such a hook does."""
    if type(hook) is not types.FunctionType or hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__:
        return False
    for step in dis.get_instructions(hook):
        if isinstance(step.argval, types.CodeType) or step.opname in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            return False
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = hook.__globals__.get(step.argval, getattr(builtins, step.argval, None))
            if not any([value is harmless for harmless in _HARMLESS]):
                return False
    return True


def _refuse_hook(hook: Any, where: str, kind: str) -> None:
    origin = getattr(hook, "__module__", type(hook).__module__) or ""
    if not (origin.split(".")[0] == "torch" or origin.startswith("onnxtrain.utils.hooks") or hook in _own_hooks
            or _touches_arguments_only(hook)):
        raise ExportError(f"{where} the {kind} hook {getattr(hook, '__qualname__', type(hook).__name__)}; what it does "
                          "besides its result would be lost.")


def refuse_lost(module: torch.nn.Module, leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Hooks, of modules or of all modules, and arguments that are no constants.

    Raises:
        ExportError, ArgumentError: there is one.
    """
    for store in _GLOBAL_HOOKS:
        for hook in getattr(torch.nn.modules.module, store).values():
            kind = store.removeprefix("_global_").removesuffix("_hooks").replace("_", " ")
            _refuse_hook(hook, "All modules have", kind)
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            raise ExportError(f"Module {name or 'itself'} has a backward hook; a graph would lose it.")
        if isinstance(module, Graph):
            continue  # Dynamo has captured what the others do
        for hook in (*child._forward_pre_hooks.values(), *child._forward_hooks.values()):
            _refuse_hook(hook, f"Module {name or 'itself'} has", "forward")
    for leaf, name in zip(leaves, names):
        if isinstance(leaf, Tensor):
            if type(leaf) not in PLAIN_TENSORS:
                raise ArgumentError(f"ORTModule does not support input type {type(leaf)} for input {name}: a subclass "
                                    "of Tensor returns results of its own class.")
        elif isinstance(leaf, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
            if not is_plain(leaf):
                raise ArgumentError(f"ORTModule does not support input type {type(leaf)} for input {name}: a function "
                                    "with its own state would be called once, while the module is traced.")
        elif not is_plain(leaf):
            raise ArgumentError(
                f"ORTModule does not support input type {type(leaf)} for input {name}: its tensors would be frozen; "
                "register it with torch.utils._pytree.register_pytree_node, or torch.export.register_dataclass."
            )


def refuse_nothing(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A call without any tensor, of a module that has none: there is nothing to run."""
    if any(isinstance(leaf, Tensor) for leaf in (*pytree.tree_leaves((args, kwargs)), *module.parameters(),
                                                 *module.buffers())):
        return
    given = {**dict(zip(inspect.signature(module.forward).parameters, args)), **kwargs}
    for name, value in given.items():
        raise ArgumentError(f"ORTModule does not support input type {type(value)} for input {name}: neither the "
                            "arguments nor the module hold a tensor, so there is nothing to run.")


def concrete(leaf: Any) -> Any:
    """A value among the outputs that is no tensor. That of a size: asking for it leaves a guard on it.

    Raises:
        ArgumentError: it is nothing that a graph may give again at each step.
    """
    kinds: list[tuple[type, Callable[[Any], Any]]] = [
        (torch.SymBool, bool), (torch.SymInt, int), (torch.SymFloat, float)]
    for symbolic, plain in kinds:
        if isinstance(leaf, symbolic):
            return plain(leaf)
    if not is_plain(leaf):
        raise ArgumentError(
            f"ORTModule fails to extract schema from data: Unsupported flatten data type: {type(leaf)}. It is, or is "
            "in, a result or an attribute set in forward, and its tensors would be lost; register it with "
            "torch.utils._pytree.register_pytree_node, or torch.export.register_dataclass."
        )
    return leaf
