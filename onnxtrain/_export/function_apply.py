"""torch.autograd.Function.apply while a module is exported: user-defined functions become nodes, or stop the export.

rewrite.patched() enters applied() for the length of an export. What a node is, functions.py knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxtrain._export import functions
from onnxtrain._export.checkpoint import Checkpoints
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
def applied(checkpoints: Checkpoints, custom: CustomFunctions) -> Iterator[None]:
    """Every use of Function.apply ends in what _applier() makes, also of a method bound before: `self.f =
    MyFunction.apply`.

    So it is the code of torch's function that is exchanged, not the attribute; where it has none, the attribute.
    """
    global _dispatch
    dispatch = _applier(checkpoints, custom)
    if not isinstance(_APPLY, types.FunctionType):
        with replaced(torch.autograd.Function, "apply", classmethod(dispatch)):
            yield
        return
    code, before = _APPLY.__code__, _dispatch
    if code.co_freevars != _Trampoline.apply.__code__.co_freevars and before is _ORIGINAL_APPLY:
        raise Untraceable("torch.autograd.Function.apply differs from the one that this release of onnxtrain supports.")
    _dispatch = dispatch
    _APPLY.__code__ = _Trampoline.apply.__code__
    try:
        yield
    finally:
        _APPLY.__code__, _dispatch = code, before


def _applier(checkpoints: Checkpoints, custom: CustomFunctions) -> Callable[..., Any]:
    """torch.autograd.Function.apply during an export."""
    original = _ORIGINAL_APPLY

    def apply(cls, *args, **kwargs):
        if not here() or functions.inside():
            return original(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run, _preserve_rng_state, *rest = args
            with checkpoints.region(run):
                return run(*rest)
        if cls.__module__.split(".")[0] == "torch":
            return original(cls, *args, **kwargs)
        if custom.nodes and (in_graph := getattr(cls, "onnxtrain_in_graph", None)) is not None:  # dynamo.py
            return in_graph(*args)
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
