"""Operations that a capture has met before, as the layers of a model repeat theirs: their results are made from what
was noted of the first, without asking torch once more for sizes, strides and types.

Dynamo runs each operation on tensors without data; with symbolic sizes that takes half of a capture. Of an operation
that makes new tensors the results follow from the operation, what its arguments are, and torch's modes. Everything
else runs as before: views, changes in place, subclasses, sizes that depend on contents. Conditions on sizes that the
first one noted hold for the others, since the symbols are the same. Used by _captured.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export.state import wrapped
from onnxtrain._torch import FakeTensor, FakeTensorMode

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Unknown(Exception):
    """An argument that no key stands for."""


class NotedResult(NamedTuple):
    """What an operation made."""

    mode: FakeTensorMode
    shape: Sequence[int | torch.SymInt]
    stride: Sequence[int | torch.SymInt]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    in_a_row: bool

    def remade(self) -> FakeTensor:
        with _torch.in_kernel_invocation_manager(self.mode), _without_guards(self.mode):
            if self.in_a_row:
                empty = torch.empty(self.shape, dtype=self.dtype, device="meta")
            else:
                empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(self.mode, empty, self.device)


class NotedResults(NamedTuple):
    """What an operation made, one tensor or a tuple of a class."""

    each: tuple[NotedResult, ...]
    kind: Callable[[Sequence[FakeTensor]], object] | None

    def remade(self, arguments: Sequence[FakeTensor]) -> object:
        made = (_Again.apply(self.each, *arguments) if any(result.requires_grad for result in self.each)
                else [result.remade() for result in self.each])
        return made[0] if self.kind is None else self.kind(made)


class _Again(torch.autograd.Function):
    """Gives results a place in autograd's graph, which Python may ask for, and torch.autograd.grad() in forward goes
    through: its results have the shapes of gradients, and no numbers.
    """

    @staticmethod
    def forward(ctx: Any, results: Sequence[NotedResult], *arguments: FakeTensor) -> tuple[FakeTensor, ...]:
        ctx.arguments = arguments
        made = tuple([result.remade() for result in results])
        ctx.mark_non_differentiable(*[each for each, noted in zip(made, results) if not noted.requires_grad])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[argument * gradients[0].sum().to(argument.dtype) if wanted else None
                       for argument, wanted in zip(ctx.arguments, ctx.needs_input_grad[1:], strict=True)]


def _without_guards(mode: FakeTensorMode) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()


def _number(value: object) -> tuple[object, ...]:
    """A size or another number, as a part of a key."""
    if not isinstance(value, _SYMBOLIC):
        return type(value), value
    node = value.node
    if type(node.hint) not in _PLAIN or node.hint is None:  # depends on contents, or is of a nested tensor
        raise Unknown
    return type(value), node.expr, node.shape_env


def _described(value: Any, tensors: list[FakeTensor]) -> tuple[object, ...]:
    """An argument as a part of a key; its tensors are added to `tensors`. Offsets in memory are left out: no result
    depends on them.
    """
    kind = type(value)
    if kind in _PLAIN or kind in _SYMBOLIC:
        return _number(value)
    if kind in (tuple, list) or kind is torch.Size:
        return kind, *[_described(part, tensors) for part in value]
    if kind is slice:
        return kind, *[_described(part, tensors) for part in (value.start, value.stop, value.step)]
    if kind is not FakeTensor or value.layout is not torch.strided or value.is_quantized or value.constant is not None:
        raise Unknown
    tensors.append(value)
    return (value.fake_mode, *map(_number, value.shape), *map(_number, value.stride()), value.dtype,
            value.fake_device, value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference())


def _modes() -> tuple[object, ...]:
    """What results depend on beyond arguments; a `with` of the module's may change it within a capture, and Dynamo
    begins again with another mode of its own.
    """
    if _torch.len_torch_function_stack() or _torch.peek_interpreter_stack() is not None:
        raise Unknown
    cpu, cuda, of_cuda = "cpu", "cuda", torch.backends.cuda
    mode = _torch.get_dispatch_mode(_torch.TorchDispatchModeKey.FAKE)
    if mode is None:
        raise Unknown
    return (mode, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.is_autocast_enabled(cpu), torch.is_autocast_enabled(cuda), torch.get_autocast_dtype(cpu),
            torch.get_autocast_dtype(cuda), torch.are_deterministic_algorithms_enabled(),
            of_cuda.flash_sdp_enabled(), of_cuda.mem_efficient_sdp_enabled(), of_cuda.math_sdp_enabled(),
            of_cuda.cudnn_sdp_enabled(), torch.backends.mkldnn.enabled)


def _noted(result: Any, arguments: Sequence[FakeTensor], versions: Sequence[int]) -> NotedResult | None:
    """What has to be known of a result; None where it is not a new tensor, or an argument was changed."""
    if (type(result) is not FakeTensor or result.layout is not torch.strided or result.constant is not None
            or result._is_view() and not torch.is_grad_enabled() or result.is_quantized or result.is_conj()
            or result.is_neg() or result.is_inference() or [value._version for value in arguments] != versions
            or result.requires_grad and not (torch.is_grad_enabled() and any(a.requires_grad for a in arguments))
            or result.untyped_storage()._cdata in [value.untyped_storage()._cdata for value in arguments]):
        return None
    sizes = (*result.shape, *result.stride(), result.storage_offset())
    if any(isinstance(size, torch.SymInt) and type(size.node.hint) is not int for size in sizes):
        return None
    if type(sizes[-1]) is not int or sizes[-1]:
        return None
    for in_a_row in (True, False):
        noted = NotedResult(result.fake_mode, result.shape, result.stride(), result.dtype, result.fake_device,
                        result.requires_grad, in_a_row)
        if _memory(noted.remade()) == _memory(result):
            return noted
    return None


def _all_noted(made: object, arguments: Sequence[FakeTensor], versions: Sequence[int]) -> NotedResults | None:
    """_noted() of one result, or of all, none of which shares memory with another."""
    if isinstance(made, Tensor):
        one = _noted(made, arguments, versions)
        return one and NotedResults((one,), None)
    if not isinstance(made, tuple) or not made or not all(isinstance(each, Tensor) for each in made):
        return None
    each = [_noted(result, arguments, versions) for result in made]
    distinct = len({result.untyped_storage()._cdata for result in made}) == len(made)
    return NotedResults(tuple(filter(None, each)), type(made)) if distinct and all(each) else None


def _memory(tensor: FakeTensor) -> list[object]:
    """The formulas of strides and of the storage's length: a result may be a part of what was made for it."""
    values = (*tensor.stride(), tensor.untyped_storage().nbytes())
    return [value.node.expr.expand() if isinstance(value, torch.SymInt) else value for value in values]


def _remembering(plain: Callable[..., object]) -> Callable[..., object]:
    """run_node that runs each operation once and makes its later results itself."""
    known: dict[tuple[object, ...], NotedResults | None] = {}

    def run_node(tracer: object, node: torch.fx.Node, args: Sequence[object], kwargs: Mapping[str, object],
                 nnmodule: object, *more: object, **named: object) -> object:  # more: what another torch may add
        arguments: list[FakeTensor] = []
        try:
            if node.op not in ("call_function", "call_method") or more or named:
                raise Unknown
            key = (node.op, node.target, _modes(), *[_described(value, arguments) for value in args],
                   *[(name, _described(value, arguments)) for name, value in kwargs.items()])
            noted = known.get(key)
        except (Unknown, TypeError):  # or a target without a hash
            return plain(tracer, node, args, kwargs, nnmodule, *more, **named)
        if noted is not None:
            return noted.remade(arguments)
        versions = [value._version for value in arguments]
        result = plain(tracer, node, args, kwargs, nnmodule)
        if key not in known:
            known[key] = _all_noted(result, arguments, versions)
        return result

    return run_node


def remembered() -> contextlib.AbstractContextManager[None]:
    """While Dynamo captures."""
    return wrapped("run_node", _remembering)
