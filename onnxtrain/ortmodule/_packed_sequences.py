"""Dynamo follows packed sequences, and captures recurrent networks as one node whatever the length of sequences.

torch's Python around packed sequences decides by numbers that tensors hold. Used by _captured.py while it captures.
What stays with PyTorch is a call that Dynamo cuts the graph for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from onnxtrain import _torch
from onnxtrain._export import packed_sequences
from onnxtrain._export.state import wrapped
from onnxtrain._torch import graph_break

for _function in (*packed_sequences.CHECKS, packed_sequences.recur_padded):
    torch.compiler.allow_in_graph(_function)


def _by_torch() -> None:
    """Cuts the graph before the call."""
    graph_break()


def _in_engine(*tensors: Tensor) -> bool:
    return all([tensor.device.type == "cpu" for tensor in tensors])


def _dtype() -> torch.dtype | None:
    """That of autocast, for the products of recurrent networks."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def _rounded(tensors: Iterable[Tensor]) -> list[Tensor]:
    """As autocast has them, in float32: the engine sums in it."""
    dtype = _dtype()
    return list(tensors) if dtype is None else [
        tensor if tensor.dtype == torch.float64 else tensor.to(dtype).float() for tensor in tensors]


def _lowered(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Results of autocast's dtype."""
    dtype = _dtype()
    return list(tensors) if dtype is None else [
        tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]


def _fits(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64) or _dtype() is not None and dtype == _dtype()


def _pack_padded_sequence(input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    lengths = lengths.to(dtype=torch.int64)
    axis = 0 if batch_first else 1
    if not _in_engine(input, lengths) or input.dim() < 2 or lengths.dim() != 1:
        _by_torch()
    order = None
    if enforce_sorted:
        if lengths.size(0) != input.size(axis):
            _by_torch()
    else:
        lengths, order = torch.sort(lengths, descending=True)
        input = input.index_select(axis, order)
    data, batch_sizes = packed_sequences.pack(input, lengths, batch_first)
    return PackedSequence(data, batch_sizes, order, rnn.invert_permutation(order))


def _pad_packed_sequence(sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0,
                         total_length: int | None = None) -> tuple[Tensor, Tensor]:
    data, batch_sizes, _, order = sequence
    if not _in_engine(data, batch_sizes):
        _by_torch()
    padded, lengths = packed_sequences.pad(data, batch_sizes, batch_first, float(padding_value), total_length)
    if order is None:
        return padded, lengths
    return padded.index_select(0 if batch_first else 1, order), lengths[order]


def _weights(network: torch.nn.RNNBase) -> list[Tensor]:
    """As attributes, which parametrizations compute; `_flat_weights` may hold those of an earlier call."""
    return [getattr(network, name) for name in network._flat_weights_names]


def _forward_padded(self: torch.nn.RNNBase, input: Tensor, hx: Any = None) -> tuple[object, object]:
    """That of nn.RNN, nn.GRU and nn.LSTM for padded sequences, where _is_padded() holds."""
    several = self.mode == "LSTM"
    if hx is None:
        layers = self.num_layers * (2 if self.bidirectional else 1)
        zeros = input.new_zeros(layers, input.size(0 if self.batch_first else 1), self.hidden_size)
        hx = (zeros, zeros) if several else zeros
    self.check_forward_args(input, hx, None)
    output, *last = _lowered(packed_sequences.recur_padded(
        self.mode.lower(), _rounded([input])[0], tuple(_rounded(hx if several else (hx,))), _rounded(_weights(self)),
        self.bias, self.num_layers, float(self.dropout), self.training, self.bidirectional, self.batch_first))
    return output, tuple(last) if several else last[0]


def _forward_projected(self: torch.nn.RNNBase, input: Tensor, hx: object = None) -> None:
    """That of nn.LSTM with proj_size, which ONNX's operator does not have."""
    _by_torch()


def _forward(self: torch.nn.RNNBase, input: PackedSequence, hx: Any = None) -> tuple[object, object]:
    """That of nn.RNN, nn.GRU and nn.LSTM."""
    data, batch_sizes, order, back = input
    self.check_input(data, batch_sizes)
    several = self.mode == "LSTM"
    states = () if hx is None else tuple(hx) if several else (hx,)
    widths = (self.proj_size or self.hidden_size, self.hidden_size)
    layers = self.num_layers * (2 if self.bidirectional else 1)
    if not _in_engine(data, batch_sizes, *states) or not _fits(data.dtype) or self.proj_size:
        _by_torch()
    for state, width in zip(states, widths):
        if state.dim() != 3 or state.size(0) != layers or state.size(2) != width or (
                state.dtype != data.dtype and _dtype() is None):
            _by_torch()
    if order is not None:
        states = tuple([state.index_select(1, order) for state in states])
    output, *last = _lowered(packed_sequences.recur(
        self.mode.lower(), _rounded([data])[0], batch_sizes, tuple(_rounded(states)), _rounded(_weights(self)),
        self.bias, self.num_layers, float(self.dropout), self.training, self.bidirectional))
    if back is not None:
        last = [state.index_select(1, back) for state in last]
    return PackedSequence(output, batch_sizes, order, back), tuple(last) if several else last[0]


def _replace(self: Any, /, **fields: object) -> object:
    """That of a named tuple. Of a class with a `__new__` of its own, Dynamo would give an empty one."""
    result = self._make([fields.pop(name, value) for name, value in zip(self._fields, self)])
    if fields:
        raise ValueError(f"Got unexpected field names: {list(fields)!r}")
    return result


def _ask_for_none(self: Any, value: bool) -> None:
    """FunctionCtx.set_materialize_grads: in a function that Dynamo follows, missing gradients are always zeros."""
    graph_break()
    self.materialize_grads = value


_INSTEAD: dict[CodeType, Callable[..., object]] = {
    FunctionCtx.set_materialize_grads.__code__: _ask_for_none,
    rnn.pack_padded_sequence.__code__: _pack_padded_sequence,
    rnn.pad_packed_sequence.__code__: _pad_packed_sequence,
    PackedSequence._replace.__code__: _replace,
}
_FORWARDS = {kind.forward.__code__ for kind in (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM)}


def _is_packed(argument: _torch.Value) -> bool:
    try:
        return argument.python_type() is PackedSequence
    except NotImplementedError:
        return False


def _instead_of_forward(module: object, arguments: list[Any]) -> Callable[..., object] | None:
    """What Dynamo captures of a recurrent network; None: its own forward."""
    if any(map(_is_packed, arguments)):
        return _forward
    examples = [argument.as_proxy().node.meta.get("example_value") for argument in arguments
                if argument.is_tensor()]
    network = getattr(module, "value", None)
    if not isinstance(network, torch.nn.RNNBase) or not examples or not _in_engine(*examples):
        return None
    if network.proj_size:
        return _forward_projected
    return _forward_padded if all([each.dim() == 3 and _fits(each.dtype) for each in examples]) else None


def _is_given_list(arguments: _torch.Values, named: _torch.Named) -> bool:
    """Whether lengths are numbers of the caller's: each list of them would be a graph of its own."""
    lengths = named.get("lengths", arguments[1] if len(arguments) > 1 else None)
    if isinstance(lengths, _torch.LazyVariableTracker) and not lengths.is_realized():
        return isinstance(lengths.original_value(), (list, tuple))
    items = getattr(lengths, "items", ())
    return isinstance(items, list) and any([getattr(item, "source", None) is not None or isinstance(
        item, _torch.LazyVariableTracker) and not item.is_realized() for item in items])


def _instead(function: object, args: _torch.Values, kwargs: _torch.Named) -> Callable[..., object] | None:
    """What Dynamo captures for a call of a function, given its first argument as well; None: that function."""
    code: Any = getattr(function, "__code__", None)
    instead = _INSTEAD.get(code)
    if code in _FORWARDS:
        instead = _instead_of_forward(args[0], [*args[1:], *kwargs.values()])
    return None if instead is _pack_padded_sequence and _is_given_list(args, kwargs) else instead


def _followed(plain: Callable[..., object]) -> Callable[..., object]:
    """call_function of Dynamo's variable for a function that it reads."""
    def call_function(self: Any, tx: _torch.Translator, args: _torch.Values, kwargs: _torch.Named) -> object:
        given = [*self.self_args(), *args]
        instead = _instead(self.fn, given, kwargs)
        return plain(self, tx, args, kwargs) if instead is None else _torch.UserFunctionVariable(
            instead).call_function(tx, given, kwargs)

    return call_function


def _not_skipped(plain: Callable[..., None]) -> Callable[..., None]:
    """Dynamo's reading of a call in Python, of a method, and of a function that it does not read."""
    def call_function(self: _torch.Translator, fn: _torch.Value, args: _torch.Values, kwargs: _torch.Named) -> None:
        instead, given = None, args
        if isinstance(fn, _torch.SkipFunctionVariable):
            instead = _instead(fn.value, args, kwargs)
        elif isinstance(fn, _torch.UserMethodVariable):
            given = [*fn.self_args(), *args]
            instead = _instead(fn.fn, given, kwargs)
        if instead is None:
            plain(self, fn, args, kwargs)
        else:
            plain(self, _torch.UserFunctionVariable(instead), given, kwargs)

    return call_function


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Within, Dynamo captures calls of these functions as those of ours."""
    with wrapped("call_of_function", _followed), wrapped("call", _not_skipped):
        yield
