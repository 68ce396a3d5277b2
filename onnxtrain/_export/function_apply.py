"""torch.autograd.Function.apply while a module is exported: user-defined functions become nodes, or stop the export.

rewrite.patched() enters applied() for the length of an export. What a node is, functions.py knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxtrain._export import functions
from onnxtrain._export.errors import CustomFunctionError, Untraceable
from onnxtrain._export.exclusive import here
from onnxtrain._export.state import replaced


@dataclasses.dataclass
class CustomFunctions:
    """What becomes of the user's torch.autograd.Functions.

    enabled: they are PythonOp nodes, but for those in `skipped` (full names); the rest are traced through, and named in
    `inlined`: autograd then differentiates their forward. nodes: whether the exporter can write such nodes.
    """

    enabled: bool = True
    skipped: tuple[str, ...] = ()
    nodes: bool = True
    inlined: list[str] = dataclasses.field(default_factory=list)


_STATIC = inspect.getattr_static(torch.autograd.Function, "apply")  # of C where torch has it there
_APPLY = getattr(_STATIC, "__func__", None)


def _original_apply() -> Callable[..., Any]:
    """The Function.apply that is in force outside an export; it takes the class first."""
    if not isinstance(_APPLY, types.FunctionType):
        return lambda cls, *args, **kwargs: _STATIC.__get__(None, cls)(*args, **kwargs)
    return types.FunctionType(_APPLY.__code__, _APPLY.__globals__, _APPLY.__name__, _APPLY.__defaults__,
                              _APPLY.__closure__)


_ORIGINAL_APPLY = _original_apply()
_dispatch: Callable[..., Any] = _ORIGINAL_APPLY


class _Trampoline:
    def apply(cls, *args, **kwargs):  # noqa: B902, N805  its code stands in for that of torch.autograd.Function.apply
        __class__  # type: ignore[name-defined]  # noqa: B018  the same free variable as torch's
        from onnxtrain._export import function_apply

        return function_apply._dispatch(cls, *args, **kwargs)


@contextlib.contextmanager
def applied(notes: list[str], custom: CustomFunctions) -> Iterator[None]:
    """Every use of Function.apply ends in what _applier() makes, also of a method bound before: `self.f =
    MyFunction.apply`.

    So it is the code of torch's function that is exchanged, not the attribute; where it has none, the attribute.
    """
    global _dispatch
    dispatch = _applier(notes, custom)
    if not isinstance(_APPLY, types.FunctionType):
        with replaced(torch.autograd.Function, "apply", classmethod(dispatch)):
            yield
        return
    code, before = _APPLY.__code__, _dispatch
    if code.co_freevars != _Trampoline.apply.__code__.co_freevars and before is _ORIGINAL_APPLY:
        raise Untraceable("torch.autograd.Function.apply is not what this release of onnxtrain knows.")
    _dispatch = dispatch
    _APPLY.__code__ = _Trampoline.apply.__code__
    try:
        yield
    finally:
        _APPLY.__code__, _dispatch = code, before


def _applier(notes: list[str], custom: CustomFunctions) -> Callable[..., Any]:
    """torch.autograd.Function.apply during an export."""
    original = _ORIGINAL_APPLY

    def apply(cls, *args, **kwargs):
        if not here() or functions.inside():
            return original(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run, _preserve_rng_state, *rest = args
            _note_checkpoint(notes, run)
            return run(*rest)
        if cls.__module__.split(".")[0] == "torch":
            return original(cls, *args, **kwargs)
        name = functions.name_of(cls)
        if not custom.enabled or name in custom.skipped:
            custom.inlined.append(name)
            return original(cls, *args, **kwargs)
        if custom.nodes:
            try:
                return functions.record(cls, args)
            except functions.Unrunnable as error:
                raise CustomFunctionError(str(error)) from error
        raise CustomFunctionError(f"The module calls torch.autograd.Function {name}; a graph would lose its backward.")

    return apply


CHECKPOINT = "torch.utils.checkpoint around "  # how the note of a checkpoint begins


def _region(run: Any) -> str:
    """What a checkpoint is around: a module's path or class, or a function's name."""
    owner = getattr(run, "__self__", run)
    if isinstance(owner, torch.fx.GraphModule):  # Dynamo's: its operations know the modules that they were called in
        stacks = [[path for path, _ in node.meta["nn_module_stack"].values()] for node in owner.graph.nodes
                  if node.meta.get("nn_module_stack")]
        shared = os.path.commonprefix(stacks) if stacks else []
        lines = [node.meta["stack_trace"].strip().splitlines()[-1].strip() for node in owner.graph.nodes
                 if node.meta.get("stack_trace")]
        path = re.sub(r"L\['\w+'\]|[\['\"\]]|_modules", "", shared[-1]).strip(".") if shared else ""
        return f"{path or 'the module'} ({lines[0]})" if lines else path or "the module"
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return str(getattr(run, "__qualname__", type(run).__name__))


def _note_checkpoint(notes: list[str], run: Any) -> None:
    note = (f"{CHECKPOINT}{_region(run)} does not mark a region: results are the same, and what backward computes "
            "again instead of keeping it is chosen for the whole step, as at ORTMODULE_MEMORY_OPT_LEVEL=1 or above, or "
            "by ORTMODULE_MEMORY_OPT_BUDGET.")
    if note not in notes:
        notes.append(note)


def inlined_checkpoint(notes: list[str]) -> Callable[..., Iterator[None]]:
    """checkpoint() advances this generator before and after the call that it makes."""

    def generator(run, *_args, **_kwargs):
        _note_checkpoint(notes, run)
        yield

    return generator
