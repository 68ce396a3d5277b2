"""Checks in a forward that look at values and raise: `if labels.max() >= classes: raise ...`, `assert mask.any()`.

A trace knows no values, and cannot go on where Python asks for one. If the answer only decides whether
forward raises, the trace takes the answer that it does not, and the condition becomes an output of the graph: a step
where it has the other value runs in PyTorch, which raises as the user wrote it. Other branches on values are not
touched.

So are the bounds of sizes made of contents, `x.narrow(0, 0, int(n))`: what the graph makes of a negative one is empty,
where torch raises.

Used by rewrite.py. Python keeps the place of each instruction in the source, and the source shows what depends on it.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

Place = tuple[int, int, int, int]  # line, last line, column, last column


@functools.lru_cache(maxsize=64)
def _statements(filename: str) -> tuple[ast.If | ast.Assert, ...]:
    """The conditions of a file; none where the source is not at hand."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.Assert)))


def _place(node: ast.AST) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]


def _wanted(statement: ast.If | ast.Assert) -> bool | None:
    """The value of a condition for which the statement does not raise; None if more depends on it."""
    if isinstance(statement, ast.Assert):
        return True
    if isinstance(statement.body[-1], ast.Raise):
        return False
    return True if statement.orelse and isinstance(statement.orelse[-1], ast.Raise) else None


def _answer(test: ast.expr, place: Place, wanted: bool) -> bool | None:
    """What the part of a condition at this place has to be, for the whole to be `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _answer(test.operand, place, not wanted)
        return (not wanted if inner is None and _place(test) == place and not isinstance(test.operand, ast.BoolOp)
                else inner)
    if isinstance(test, ast.BoolOp):  # one part of its value is enough, or all of them have it
        found = (_answer(value, place, wanted) for value in test.values)
        return next((answer for answer in found if answer is not None), None)
    return wanted if _place(test) == place else None


def _places(frame: types.FrameType) -> list[Place]:
    """Of the running instruction and, where that is a jump, of what made the value that it looks at.

    A jump stands at the whole statement in Python 3.11, at its operand later.
    """
    code, at = frame.f_code, frame.f_lasti // 2
    found = list(itertools.islice(code.co_positions(), at + 1))
    own = found[-1:]
    if "JUMP" in dis.opname[code.co_code[frame.f_lasti]] or "BOOL" in dis.opname[code.co_code[frame.f_lasti]]:
        own += found[at - 1:at]
    return [place for place in own if None not in place]  # type: ignore[misc]


def answer(frame: types.FrameType) -> bool | None:
    """What to say to the frame's running instruction, which asks for a tensor's truth; None if more depends on it."""
    statements = _statements(frame.f_code.co_filename)
    for place in _places(frame):
        for statement in statements:
            wanted = _wanted(statement)
            if wanted is not None and (found := _answer(statement.test, place, wanted)) is not None:
                return found
    return None


def _number(x: Any) -> Tensor:
    return torch.scalar_tensor(x, dtype=torch.int64)


def _narrow(input: Tensor, dim: int, start: Any, length: Any) -> Tensor:
    size, first, count = (_number(x) for x in (input.shape[dim], start, length))
    first = torch.where(first < 0, first + size, first)
    return (count >= 0) & (first >= 0) & (first + count <= size)


def _arange(*bounds: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> Tensor:
    if len(bounds) == 1:
        bounds = (start, *bounds)
    first, last, by = (*bounds, *(start, end, step)[len(bounds):])
    return (_number(last) - _number(first)) * _number(by).sign() >= 0


def _eye(n: Any, m: Any = 0, **_: Any) -> Tensor:
    return (_number(n) >= 0) & (_number(m) >= 0)


_SIZED: dict[Any, Callable[..., Tensor]] = {torch.narrow: _narrow, Tensor.narrow: _narrow, torch.arange: _arange,
                                            torch.eye: _eye}


def of_sizes(function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """What has to hold for torch not to raise in this call, where it takes whole numbers made of contents."""
    condition = _SIZED.get(function)
    if condition is None:
        return None
    numbers = (*args[function is not torch.arange and function is not torch.eye:], *kwargs.values())
    if any(isinstance(x, (float, torch.SymFloat, Tensor)) for x in numbers):
        return None
    made = any(isinstance(x, torch.SymInt) and free_unbacked_symbols(x) for x in numbers)
    return condition(*args, **kwargs) if made else None
