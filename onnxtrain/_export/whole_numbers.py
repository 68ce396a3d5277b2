"""int(x) of a tensor in the user's code: a data-dependent size, as in `groups = int(batch.max()) + 1`.

Python's int() makes an int and nothing else, so a trace, which could go on with the symbol that x.item() is, has to
stop there. What stops it is noted, and the trace begins again with those functions calling an int() that gives x.item()
for a tensor. Nothing else in them changes: `isinstance(x, int)` and `type(x) is int` read Python's own. Used by
rewrite.py and export.py.
"""

from __future__ import annotations

import builtins
import dis
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from onnxtrain._export import exclusive

_NAME = "int of onnxtrain"  # not an identifier, so no other code has it
_noted: dict[types.CodeType, tuple[types.CodeType, list[weakref.ref[types.FunctionType]]]] = {}
T = TypeVar("T")


def _whole(*args: Any, **kwargs: Any) -> Any:
    """int(), but the traced number for a tensor of whole numbers."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and exclusive.here():
        x = args[0]
        if not (x.is_floating_point() or x.is_complex() or x.dtype.itemsize == 1) and x.numel() == 1:
            return x.item()
    return int(*args, **kwargs)


def _calling_ours(code: types.CodeType) -> types.CodeType | None:
    """The code with each call of a global `int` a call of ours; None where there is none."""
    at, length = len(code.co_names), 0
    instructions = bytearray(code.co_code)
    for instruction in dis.get_instructions(code):
        # The lowest bit of the argument says that what is loaded is called next.
        argument = instruction.arg or 0
        called = instruction.opname == "LOAD_GLOBAL" and instruction.argval == "int" and argument & 1
        if called and 2 * at + 1 < 256 and argument < 256:  # one byte's room
            instructions[instruction.offset + 1] = 2 * at + 1
            length += 1
    return code.replace(co_code=bytes(instructions), co_names=(*code.co_names, _NAME)) if length else None


def note(frame: types.FrameType) -> None:
    """Says that the frame's function has stopped a trace with int() of a tensor."""
    code = frame.f_code
    changed = None if code in _noted or code is _whole.__code__ else _calling_ours(code)
    if changed is not None:
        functions = [weakref.ref(holder) for holder in gc.get_referrers(code)
                     if isinstance(holder, types.FunctionType) and holder.__code__ is code]
        _noted[code] = changed, functions
        setattr(builtins, _NAME, _whole)


@contextmanager
def _replaced() -> Iterator[None]:
    """Within, the noted functions call our int()."""
    found = [(function, code, changed) for code, (changed, references) in _noted.items()
             for reference in references if (function := reference()) is not None and function.__code__ is code]
    try:
        for function, _, changed in found:
            function.__code__ = changed
        yield
    finally:
        for function, code, changed in found:
            if function.__code__ is changed:
                function.__code__ = code


def traced(trace: Callable[[], T]) -> T:
    """What `trace` returns, called again for as long as it stops at a function that had not been noted before."""
    while True:
        before = len(_noted)
        try:
            with _replaced():
                return trace()
        except Exception:
            if len(_noted) == before:
                raise
