"""What torch.onnx writes for packed sequences: recurrent operators over padded ones, and their lengths.

The data of a packed sequence are rows of the padded one, chosen by an index. Where a layer made the data, or they were
packed here, what follows takes the padded form: the index is for whatever else reads the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch

from onnxtrain._export.elementary import Operators, Table, Value, constant, number
from onnxtrain._export.packed_sequences import KINDS

_MARK = "onnxtrain padded"  # the padded form (T, B, ...) of a value and lengths (B), and whether its padding is zero
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}  # where torch has those of ONNX's order


def packed(op: Operators, own: Operators) -> Table:
    """Those of packed_sequences.py."""

    def ints(*values: int) -> Value:
        return op.Constant(value_ints=list(values))

    def column(x: Value) -> Value:
        return op.Unsqueeze(x, ints(1))

    def count_to(end: Value) -> Value:
        """0, 1 ... end - 1, of a vector of one number."""
        return op.Range(op.Constant(value_int=0), op.Squeeze(end, ints(0)), op.Constant(value_int=1))

    def vector(number: Value) -> Value:
        return ints(number) if isinstance(number, int) else op.Reshape(number, ints(1))

    def marked(x: Value, rank: int, lens: Value, zeros: bool) -> tuple[Value, Value]:
        """The data, and which cells (T, B) they are."""
        live = op.Less(column(count_to(op.Shape(x, start=0, end=1))), lens)  # (T, B)
        at = op.Squeeze(op.NonZero(op.Reshape(live, ints(-1))), ints(0))
        flat = op.Concat(ints(-1), op.Shape(x, start=2), axis=0) if rank > 2 else ints(-1)
        data = op.Gather(op.Reshape(x, flat), at, axis=0)
        data.meta[_MARK] = x, lens, zeros
        return data, live

    def cells_of(data: Value, batch_sizes: Value, sequences: Value) -> tuple[Value, Value]:
        """The padded form of data, with one row or another as padding, and the lengths (B)."""
        live = op.Less(count_to(sequences), column(batch_sizes))  # (T, B)
        lens = op.ReduceSum(op.Cast(live, to=onnx.TensorProto.INT64), ints(0), keepdims=0)
        before = op.CumSum(batch_sizes, op.Constant(value_int=0), exclusive=1)
        at = op.Add(column(before), count_to(sequences))
        return op.Gather(data, op.Where(live, at, op.Constant(value_int=0)), axis=0), lens

    def padded(data: Value, batch_sizes: Value, sequences: Value) -> tuple[Value, Value, bool]:
        known: tuple[Value, Value, bool] | None = data.meta.get(_MARK)
        return known or (*cells_of(data, batch_sizes, vector(sequences)), False)

    def pack(input: Value, lengths: Value, batch_first: bool) -> tuple[Value, Value]:
        order = [1, 0, *range(2, len(input.shape))]
        x = op.Transpose(input, perm=order) if batch_first else input
        data, live = marked(x, len(order), lengths, False)
        sizes = op.ReduceSum(op.Cast(live, to=onnx.TensorProto.INT64), ints(1), keepdims=0)
        return data, op.Slice(sizes, ints(0), op.ReduceMax(lengths), ints(0))

    def pad(data: Value, batch_sizes: Value, batch_first: bool, value: float, length: Value, sequences: Value,
            ) -> tuple[Value, Value]:
        x, lens, zeros = padded(data, batch_sizes, sequences)
        rank, end = len(data.shape) + 1, vector(length)
        before, behind = ints(*[0] * rank), op.Max(op.Sub(end, op.Shape(x, start=0, end=1)), ints(0))
        x = op.Slice(op.Pad(x, op.Concat(before, behind, ints(*[0] * (rank - 1)), axis=0)), ints(0), end, ints(0))
        if value or not zeros:
            live = op.Less(column(count_to(end)), lens)
            live = op.Unsqueeze(live, ints(*range(2, rank))) if rank > 2 else live
            x = op.Where(live, x, number(op, value, data))
        return op.Transpose(x, perm=[1, 0, *range(2, rank)]) if batch_first else x, lens

    def gates(kind: str, weight: Value) -> Value:
        if kind not in _GATES:
            return weight
        order = _GATES[kind]
        parts = op.Split(weight, axis=0, num_outputs=len(order))
        return op.Concat(*[parts[i] for i in order], axis=0)

    def stacked(kind: str, weights: Sequence[Value]) -> Value:
        """One tensor of all directions (D, ...); of biases those of the input and of the state, joined."""
        made = [op.Unsqueeze(op.Concat(*[gates(kind, part) for part in w], axis=0) if isinstance(w, list) else
                             gates(kind, w), ints(0)) for w in weights]
        return op.Concat(*made, axis=0) if len(made) > 1 else made[0]

    def layer(kind: str, x: Value, lens: Value | None, states: Sequence[Value], weights: Sequence[Value], bias: bool,
              ) -> tuple[Value, list[Value]]:
        """y (T, B, D * H) and last states (D, B, H)."""
        each = 4 if bias else 2
        own_weights = [weights[i:i + each] for i in range(0, len(weights), each)]
        first, again = (stacked(kind, [w[i] for w in own_weights]) for i in range(2))
        biases = stacked(kind, [list(w[2:]) for w in own_weights]) if bias else None
        directions, hidden = len(own_weights), own_weights[0][1].shape[1]
        more: dict[str, object] = {"linear_before_reset": 1} if kind == "gru" else {}
        if kind.startswith("rnn"):  # the schema's default is for two directions
            more["activations"] = ["Relu" if kind == "rnn_relu" else "Tanh"] * directions
        write = getattr(op, {"lstm": "LSTM", "gru": "GRU"}.get(kind, "RNN"))
        counts = None if lens is None else op.Cast(lens, to=onnx.TensorProto.INT32)
        y, *last = write(x, first, again, biases, counts, *states, hidden_size=int(hidden),
                         direction="bidirectional" if directions > 1 else "forward", **more)
        y = op.Transpose(y, perm=[0, 2, 1, 3])
        return op.Reshape(y, ints(0, 0, directions * int(hidden))), last

    def layers_of(kind: str, x: Value, lens: Value | None, states: Sequence[Value], weights: Sequence[Value],
                  bias: bool, layers: int, dropout: float, train: bool, bidirectional: bool) -> tuple[Value, ...]:
        """y (T, B, D * H), and last states."""
        directions = 2 if bidirectional else 1
        each, last = len(weights) // layers, []
        for k in range(layers):
            of_layer = [op.Slice(s, ints(k * directions), ints((k + 1) * directions), ints(0)) for s in states]
            if k and dropout and train:
                x, _ = op.Dropout(x, constant(op, dropout, onnx.TensorProto.FLOAT),
                                  constant(op, True, onnx.TensorProto.BOOL))
            x, ends = layer(kind, x, lens, of_layer, weights[k * each:(k + 1) * each], bias)
            last.append(ends)
        return x, *[op.Concat(*ends, axis=0) if layers > 1 else ends[0] for ends in zip(*last)]

    def network(kind: str) -> Callable[..., tuple[Value, ...]]:
        def translate(data: Value, batch_sizes: Value, states: Sequence[Value], weights: Sequence[Value],
                      *settings: Any) -> tuple[Value, ...]:
            x, lens, _ = padded(data, batch_sizes, settings[-1])
            y, *last = layers_of(kind, x, lens, states, weights, *settings[:-1])
            return marked(y, 3, lens, True)[0], *last

        return translate

    def network_padded(kind: str) -> Callable[..., tuple[Value, ...]]:
        def translate(input: Value, states: Sequence[Value], weights: Sequence[Value], *settings: Any,
                      ) -> tuple[Value, ...]:
            turn = (lambda x: op.Transpose(x, perm=[1, 0, 2])) if settings[-1] else lambda x: x
            y, *last = layers_of(kind, turn(input), None, states, weights, *settings[:-1])
            return turn(y), *last

        return translate

    own_ops = torch.ops.onnxtrain
    return {own_ops.pack.default: pack, own_ops.pad.default: pad,
            **{getattr(own_ops, kind).default: network(kind) for kind in KINDS},
            **{getattr(own_ops, f"{kind}_padded").default: network_padded(kind) for kind in KINDS}}
