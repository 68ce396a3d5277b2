"""Calls of torch.autograd.Function while a graph is traced: nodes that run the function itself, or plain operators.

dynamo.py calls traced() for each of Dynamo's operators autograd_function_apply; export.py enters deciding() for the
length of an export. What a node is, autograd_functions.py knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Sequence

import torch

from onnxtrain._export import autograd_functions
from onnxtrain._export.errors import CustomFunctionError
from onnxtrain._export.exclusive import here


@dataclasses.dataclass
class CustomFunctions:
    """What becomes of the user's torch.autograd.Functions.

    enabled: they are PythonOp nodes, but for those in `skipped` (full names); the rest are traced through, and named in
    `inlined`: the engine then differentiates their forward.
    """

    enabled: bool = True
    skipped: tuple[str, ...] = ()
    inlined: list[str] = dataclasses.field(default_factory=list)


_custom: CustomFunctions | None = None  # of the export that is under way
_APPLY = getattr(torch.autograd.Function.apply, "__code__", None)  # None where torch has it in C


@contextlib.contextmanager
def deciding(custom: CustomFunctions) -> Iterator[None]:
    """Within, this thread traces a graph."""
    global _custom
    before, _custom = _custom, custom
    try:
        yield
    finally:
        _custom = before


def is_traced() -> bool:
    """Whether this thread traces a graph, and not the forward of a function for the shapes of its results."""
    return _custom is not None and here() and not autograd_functions.inside()


def traced(function: type[torch.autograd.Function], run: Callable[..., Sequence[object]], args: Sequence[object],
           in_graph: Callable[..., object] | None) -> object:
    """The results of a function that a graph calls; is_traced() must hold.

    Args:
        run: its forward in plain operators: (results, what backward wants).
        in_graph: a form that the engine has operators for.
    """
    assert _custom is not None
    if in_graph is not None:
        return in_graph(*args)
    name = autograd_functions.name_of(function)
    if not _custom.enabled or name in _custom.skipped:
        _custom.inlined.append(name)
        return run(*args)[0]
    return autograd_functions.record(function, tuple(args))


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Within, a function runs that Dynamo did not look into (torch.compiler.allow_in_graph). A trace would see only the
    forward of a torch.autograd.Function that it calls.

    Raises:
        CustomFunctionError: it calls one.
    """
    before = sys.getprofile()

    def look(frame: types.FrameType, event: str, called: object) -> None:
        kind: object = None
        if event == "call" and frame.f_code is _APPLY:
            kind = frame.f_locals.get("cls")
        elif event == "c_call" and getattr(called, "__name__", "") == "apply":
            kind = getattr(called, "__self__", None)
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            sys.setprofile(before)
            raise CustomFunctionError(f"The module calls torch.autograd.Function {autograd_functions.name_of(kind)} "
                                      "in a function that Dynamo keeps whole; a graph would lose its backward.")

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
