"""Recurrent networks, and packed sequences: what a captured graph calls to pack, to pad and to run such a network.

Each function is one node of the graph. Of real tensors it is torch's own, gradients included, so that PyTorch can run
the graph. While Dynamo captures, and in an export, it is an operator of torch.ops.onnxtrain, whose sizes depend on
contents; packed_sequences_onnx.py says what becomes of that. ortmodule/_packed_sequences.py has Dynamo call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from onnxtrain._export.domain import library
from onnxtrain._torch import VF, FakeTensor

Size = int | torch.SymInt
KINDS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
library.define("pack(Tensor input, Tensor lengths, bool batch_first) -> (Tensor, Tensor)")
library.define("pad(Tensor data, Tensor batch_sizes, bool batch_first, float value, SymInt length, SymInt sequences) "
               "-> (Tensor, Tensor)")
for _kind in KINDS:
    library.define(f"{_kind}(Tensor data, Tensor batch_sizes, Tensor[] states, Tensor[] weights, bool bias, "
                   "int layers, float dropout, bool train, bool bidirectional, SymInt sequences) -> "
                   f"({', '.join(['Tensor'] * (3 if _kind == 'lstm' else 2))})")
    library.define(f"{_kind}_padded(Tensor input, Tensor[] states, Tensor[] weights, bool bias, int layers, "
                   "float dropout, bool train, bool bidirectional, bool batch_first) -> "
                   f"({', '.join(['Tensor'] * (3 if _kind == 'lstm' else 2))})")


class _Sizes(NamedTuple):
    """What the sizes of a packed sequence's tensors do not say: noted on its batch sizes, while there are no values."""

    rows: Size  # of the data
    sequences: Size


def _pack_fake(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    rows, steps = (torch.library.get_ctx().new_dynamic_size(min=1) for _ in range(2))
    return input.new_empty(rows, *input.shape[2:]), lengths.new_empty(steps)


def _pad_fake(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, length: Size, sequences: Size,
              ) -> tuple[Tensor, Tensor]:
    leading = (sequences, length) if batch_first else (length, sequences)
    return data.new_empty(*leading, *data.shape[1:]), batch_sizes.new_empty(sequences)


def _recur_fake(data: Tensor, batch_sizes: Tensor, states: list[Tensor], weights: list[Tensor], bias: bool, layers: int,
                dropout: float, train: bool, bidirectional: bool, sequences: Size) -> tuple[Tensor, ...]:
    width, directions = weights[1].shape[1], 1 + bidirectional  # of the state, projected or not
    return data.new_empty(data.shape[0], directions * width), data.new_empty(layers * directions, sequences, width)


def _lstm_fake(data: Tensor, batch_sizes: Tensor, states: list[Tensor], weights: list[Tensor], *more: Any,
               ) -> tuple[Tensor, ...]:
    output, last = _recur_fake(data, batch_sizes, states, weights, *more)
    return output, last, data.new_empty(*last.shape[:2], weights[0].shape[0] // 4)


def _padded_fake(input: Tensor, states: list[Tensor], weights: list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    width = weights[1].shape[1] * (1 + settings[4])
    return input.new_empty(*input.shape[:2], width), *[torch.empty_like(state) for state in states]


torch.library.register_fake("onnxtrain::pack", _pack_fake, lib=library)
torch.library.register_fake("onnxtrain::pad", _pad_fake, lib=library)
for _kind in KINDS:
    torch.library.register_fake(f"onnxtrain::{_kind}", _lstm_fake if _kind == "lstm" else _recur_fake, lib=library)
    torch.library.register_fake(f"onnxtrain::{_kind}_padded", _padded_fake, lib=library)


def _is_traced(tensor: Tensor) -> bool:
    """Whether there are no values."""
    return isinstance(tensor, FakeTensor) or torch.compiler.is_exporting()


def _sequences(batch_sizes: Tensor) -> Any:
    """How many sequences there are, from what is known of them or their first batch."""
    known = getattr(batch_sizes, "_packed", None)
    return known.sequences if known is not None else batch_sizes[0].item()


def pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Data and batch sizes of padded sequences, the longest first: input (B, T, ...) or (T, B, ...), lengths (B)."""
    if has_torch_function((input, lengths)):
        return handle_torch_function(pack, (input, lengths), input, lengths, batch_first)
    if not _is_traced(input):
        return VF._pack_padded_sequence(input, lengths, batch_first)
    data, batch_sizes = torch.ops.onnxtrain.pack(input, lengths, batch_first)
    batch_sizes._packed = _Sizes(data.shape[0], input.shape[0 if batch_first else 1])
    return data, batch_sizes


def pad(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, length: Any) -> tuple[Tensor, Tensor]:
    """Padded sequences, of this length or that of the longest, and their lengths."""
    if has_torch_function((data, batch_sizes)):
        return handle_torch_function(pad, (data, batch_sizes), data, batch_sizes, batch_first, value, length)
    longest = batch_sizes.shape[0]
    if _is_traced(data):
        return torch.ops.onnxtrain.pad(data, batch_sizes, batch_first, value, longest if length is None else length,
                                       _sequences(batch_sizes))
    if length is not None and length < longest:
        raise ValueError("Expected total_length to be at least the length of the longest sequence in input, but got "
                         f"total_length={length} and max sequence length being {longest}")
    return VF._pad_packed_sequence(data, batch_sizes, batch_first, value, longest if length is None else length)


def recur(kind: str, data: Tensor, batch_sizes: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor],
          *settings: Any) -> tuple[Tensor, ...]:
    """The packed results of a recurrent network and its last states.

    Args:
        kind: one of KINDS.
        states: the initial ones, with sequences in the order of `batch_sizes`; none: zeros.
        weights: as torch has them, layer by layer.
        settings: whether there are biases; layers; dropout between these; training; whether it is bidirectional.
    """
    given = (data, batch_sizes, *states, *weights)
    if has_torch_function(given):
        return handle_torch_function(recur, given, kind, data, batch_sizes, states, weights, *settings)
    if _is_traced(data):
        operator = getattr(torch.ops.onnxtrain, kind)
        sequences = states[0].shape[1] if states else _sequences(batch_sizes)
        return operator(data, batch_sizes, states, weights, *settings, sequences)
    sequences, directions = int(batch_sizes[0]), 1 + settings[4]
    if not states:
        widths = [weights[1].shape[1], weights[0].shape[0] // 4][:2 if kind == "lstm" else 1]
        states = [data.new_zeros(settings[1] * directions, sequences, width) for width in widths]
    for state in states:
        expected = (state.shape[0], sequences, state.shape[2])
        if state.shape != expected:
            raise RuntimeError(f"Expected hidden size {expected}, got {list(state.shape)}")
    return getattr(VF, kind)(data, batch_sizes, states if kind == "lstm" else states[0], weights, *settings)


def recur_padded(kind: str, input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *settings: Any,
                 ) -> tuple[Tensor, ...]:
    """The results of a recurrent network over sequences of one length, and its last states; see recur().

    torch's own operator, traced, would be one of its steps after the other, and of this length alone.
    """
    if _is_traced(input):
        operator = getattr(torch.ops.onnxtrain, f"{kind}_padded")
        return operator(input, states, weights, *settings)
    return getattr(VF, kind)(input, states if kind == "lstm" else states[0], weights, *settings)


# ---- what torch would raise ----


def _packs(input: Tensor, lengths: Tensor, batch_first: bool) -> Tensor:
    """Whether lengths are from 1 to the input's, in descending order."""
    fit = (lengths > 0).all() & (lengths <= input.shape[1 if batch_first else 0]).all()
    return fit & (lengths[1:] <= lengths[:-1]).all()


def _is_whole(data: Tensor, batch_sizes: Tensor, sequences: Size | None = None) -> Tensor | None:
    """Whether these are the batch sizes of such data; None where that is known."""
    known = getattr(batch_sizes, "_packed", None)
    if known is not None and _same(data.shape[0], known.rows) and (sequences is None
                                                                 or _same(sequences, known.sequences)):
        return None
    holds = ((batch_sizes.sum() == data.shape[0]) & (batch_sizes > 0).all()
             & (batch_sizes[1:] <= batch_sizes[:-1]).all())
    return holds if sequences is None else holds & (batch_sizes[0] == sequences)


def _same(one: Size, other: Size) -> bool:
    one, other = (size.node.expr if isinstance(size, torch.SymInt) else size for size in (one, other))
    return bool(one == other)


def _pads(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, length: Any) -> Tensor | None:
    whole = _is_whole(data, batch_sizes)
    if length is None:
        return whole
    fits = torch.scalar_tensor(length, dtype=torch.int64) >= torch.scalar_tensor(batch_sizes.shape[0],
                                                                                dtype=torch.int64)
    return fits if whole is None else whole & fits


def _recurs(kind: str, data: Tensor, batch_sizes: Tensor, states: Sequence[Tensor], *_: object) -> Tensor | None:
    return _is_whole(data, batch_sizes, states[0].shape[1] if states else None)


CHECKS: dict[object, Callable[..., Tensor | None]] = {pack: _packs, pad: _pads, recur: _recurs}
