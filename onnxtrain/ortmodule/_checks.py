"""Checks of forward's that only raise: `assert mask.any()`, `if x.isnan().any(): raise ValueError(...)`.

Dynamo cuts a graph where Python branches on what a tensor holds. Where one of the two branches can only raise, the
graph goes on with the other one, and has the condition as a check. PyTorch runs a call whose check fails, from its
beginning, and raises what forward raises, with its text. So this is for the first graph of a call, before which
nothing has happened that would happen twice: behind a cut Python takes the branch. Used by _captured.py and dynamo.py.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export.autograd_calls import is_traced
from onnxtrain._export.state import settings, wrapped
from onnxtrain._torch import assert_async
from onnxtrain.ortmodule._program import CheckError

_COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
_LONGEST = 200  # instructions of a branch
# The jumps of `if` and `assert`, in Python 3.11 by direction, and whether each is taken where the condition holds.
_JUMPS = {f"POP_JUMP_{way}IF_{str(holds).upper()}": holds for way in ("", "FORWARD_", "BACKWARD_")
          for holds in (True, False)}


class _Failed(threading.local):
    """Whether a check has failed in the graph that PyTorch runs in this thread."""

    yes = False


_failed = _Failed()


@torch.fx.node.has_side_effect
def require(condition: Tensor) -> None:
    """In a graph: what has to hold. Where PyTorch runs the graph it goes on to its end, as it has modes to leave."""
    if is_traced():
        assert_async(condition)
    else:
        _failed.yes = _failed.yes or not condition


def has_checks(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph has such checks, in regions of checkpoint() as well."""
    return any(node.target is require for part in graph.modules() if isinstance(part, torch.fx.GraphModule)
               for node in part.graph.nodes)


def checked(run: Callable[..., object]) -> Callable[..., object]:
    """What runs a graph that has such checks; it raises CheckError where one fails, in place of any other exception."""
    def call(*given: object) -> object:
        _failed.yes = False
        try:
            results = run(*given)
        except Exception as error:
            if _failed.yes:
                raise CheckError("an assertion in forward fails") from error
            raise
        if _failed.yes:
            raise CheckError("an assertion in forward fails")
        return results

    return call


def _only_raises(tx: _torch.Translator, start: int) -> bool:
    """Whether every way on from an instruction ends in an exception."""
    ways, seen = [start], set()
    while ways:
        place = ways.pop()
        if place in seen:
            continue
        seen.add(place)
        instruction = tx.instructions[place]
        name = instruction.opname
        if name.startswith(("RETURN", "YIELD", "INTERPRETER_EXIT")) or len(seen) > _LONGEST:
            return False
        if name in ("RAISE_VARARGS", "RERAISE"):
            continue
        if instruction.target is not None and "JUMP" in name or name in ("FOR_ITER", "SEND"):
            ways.append(tx.indexof[instruction.target])
        if not name.startswith("JUMP_") or "_IF_" in name:
            ways.append(place + 1)
    return True


def _condition(tx: _torch.Translator, value: _torch.Value) -> _torch.Value | None:
    """Dynamo's value of a branch as a tensor of one element; None where Dynamo knows it, or it is another one."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    value = value.realize() if isinstance(value, _torch.LazyVariableTracker) else value
    if isinstance(value, _torch.SymNodeVariable):
        if not free_unbacked_symbols(value.sym_num):
            return None
        whole = all(symbol.is_integer for symbol in value.sym_num.node.expr.free_symbols)
        if not whole:
            return _compared(tx, value.as_proxy().node)
        made = tx.output.create_proxy("call_function", torch.scalar_tensor, (value.as_proxy(),), {})
        return _torch.wrap_fx_proxy(tx, made)
    if not isinstance(value, _torch.TensorVariable) or value.python_type() is not torch.Tensor:
        return None
    count = value.proxy.node.meta["example_value"].numel()
    return value if isinstance(count, int) and count == 1 else None


def _compared(tx: _torch.Translator, node: torch.fx.Node) -> _torch.Value | None:
    """The comparison of floats that tensors held, which Python has in double precision, as one of tensors."""
    if node.target not in _COMPARISONS or any(each.target != "item" for each in node.all_input_nodes):
        return None
    create, operands = tx.output.create_proxy, []
    for operand in node.args:
        if isinstance(operand, torch.fx.Node):
            held: Any = operand.args[0]
            wide = create("call_method", "double", (torch.fx.Proxy(held, tx.output),), {})
            operand = _torch.wrap_fx_proxy(tx, wide).as_proxy()
        operands.append(operand)
    return _torch.wrap_fx_proxy(tx, create("call_function", node.target, tuple(operands), {}))


def _is_inside(tracer: Any) -> bool:
    """Whether Dynamo reads a branch of a torch.cond, say, in which it keeps an `assert` in a way of its own."""
    while tracer.parent is not None:
        if tracer.source_target is not torch.ops.higher_order.tag_activation_checkpoint:
            return True
        tracer = tracer.parent
    return False


def _becomes_check(tx: _torch.Translator, place: int, jumps: bool) -> bool:
    """Whether a jump is one around an exception: the graph has it as a check then, and Dynamo goes on behind it."""
    if isinstance(tx.stack[-1], _torch.ConstantVariable):
        return False
    target = tx.indexof[tx.instructions[place].target]
    raises = _only_raises(tx, place + 1), _only_raises(tx, target)
    condition = _condition(tx, tx.stack[-1]) if raises[0] is not raises[1] else None
    if condition is None:
        return False
    if jumps is raises[1]:  # the way to the exception is taken where it holds
        condition = condition.call_method(tx, "logical_not", [], {})
    tx.output.create_proxy("call_function", require, (condition.as_proxy(),), {})
    tx.pop()
    tx.instruction_pointer = place + 1 if raises[1] else target
    return True


def kept_as_checks(entry: Callable[..., object], module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """While Dynamo captures calls of this function, which calls the module. Where it cuts the graph at that call,
    forward is the first code that it captures.
    """
    forward = None if module._forward_pre_hooks else getattr(module.forward, "__func__", None)
    called = getattr(entry, "_torchdynamo_orig_callable", entry), forward
    codes = [code for function in called if (code := getattr(function, "__code__", None)) is not None]

    def steps(plain: Callable[..., bool]) -> Callable[..., bool]:
        def step(self: _torch.Translator) -> bool:
            place = self.instruction_pointer
            jumps = None if place is None else _JUMPS.get(self.instructions[place].opname)
            if jumps is None or _is_inside(self.output.current_tracer):
                return plain(self)
            if self.output.root_tx.f_code not in codes:
                with settings(_torch.dynamo_config, rewrite_assert_with_torch_assert=False):
                    return plain(self)  # with it, the exception would be lost
            return _becomes_check(self, place, jumps) or plain(self)

        return step

    return wrapped("translate_step", steps)
