"""Parts of tensors: pieces, slices that are written, turned rows, places in sorted rows.

translations.py adds this table to its own. torch.onnx makes a sequence of pieces and writes a slice row by row, and
torch's decomposition of a search has a dozen operators for each halving.
"""

from __future__ import annotations

import functools
import sys

import onnx
import onnx_ir
import torch

from onnxtrain._export.elementary import Operators, Table, constant
from onnxtrain._export.errors import Untraceable
from onnxtrain.utils.torch_io_helper import onnx_dtype_to_pytorch_dtype, pytorch_type_to_onnx_dtype

aten = torch.ops.aten


def slices(op: Operators, own: Operators) -> Table:
    """The translations, for operators of one opset and of our domain."""

    def ints(*values):
        return op.Constant(value_ints=list(values))

    def slice_scatter(self, src, dim=0, start=None, end=None, step=1):
        """What is before the slice, the slice, and what is behind it."""
        start, end = 0 if start is None else start, sys.maxsize if end is None else end
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end and step == 1):
            from onnxscript.function_libs.torch_lib.ops import core

            return core.aten_slice_scatter(self, src, dim, start, end, step)
        axis = ints(dim)
        before = [op.Slice(self, ints(0), ints(start), axis)] if start else []
        behind = [op.Slice(self, ints(end), ints(sys.maxsize), axis)] if end < sys.maxsize else []
        source = src if src.dtype == self.dtype else op.CastLike(src, self)
        if not before and not behind:
            never = constant(op, False, onnx.TensorProto.BOOL)
            return op.Where(never, self, source)  # self has a gradient of zeros
        return op.Concat(*before, source, *behind, axis=dim)

    def as_strided_scatter(self, src, size, stride, storage_offset=None):
        """At the places of the view, of a tensor whose elements lie row by row: simplify.py has seen to that."""
        places = op.Constant(value_int=storage_offset or 0)
        for length, step in zip(size, stride):
            scalar = [op.Constant(value_int=n) if isinstance(n, int) else op.Squeeze(n) for n in (length, step)]
            along = op.Mul(op.Range(op.Constant(value_int=0), scalar[0], op.Constant(value_int=1)), scalar[1])
            places = op.Add(op.Unsqueeze(places, ints(-1)), along)
        source = src if src.dtype == self.dtype else op.CastLike(src, self)
        flat, at, written = (op.Reshape(x, ints(-1)) for x in (self, places, source))
        return op.Reshape(op.ScatterElements(flat, at, written), op.Shape(self), allowzero=1)

    def roll(self, shifts, dims=()):
        """By Split, whose gradient is a Concat, where those of two slices are zeros, written and added."""
        if not dims or not all(isinstance(shift, int) for shift in shifts):
            from onnxscript.function_libs.torch_lib.ops import core

            return core.aten_roll(self, shifts, dims)
        rank = len(self.shape)
        for dim, shift in zip((d % rank for d in dims), shifts):
            size = op.Shape(self, start=dim, end=dim + 1)
            last = op.Mod(ints(shift), op.Max(size, ints(1)))
            # The number of outputs has no place beside sizes: export.py takes it off.
            pieces = op.Split(self, op.Concat(op.Sub(size, last), last, axis=0), axis=dim, num_outputs=2)
            self = op.Concat(pieces[1], pieces[0], axis=dim)
        return self

    def searchsorted(sorted_sequence, self, out_int32=False, right=False, side=None, sorter=None):
        if sorter is not None:
            raise Untraceable("The module calls searchsorted with a sorter.")
        rows, values = promoted(sorted_sequence, self)
        places = own.SearchSorted(rows, values, right=int(right or side == "right"))
        return op.Cast(places, to=onnx.TensorProto.INT32) if out_int32 else places

    def promoted(a, b):
        """Both as float32 where they have 16 bits, and as the wider of two dtypes."""
        wide: dict[int, int] = {onnx.TensorProto.FLOAT16: onnx.TensorProto.FLOAT,
                                onnx.TensorProto.BFLOAT16: onnx.TensorProto.FLOAT}
        kinds = [onnx_dtype_to_pytorch_dtype(wide.get(int(x.dtype), int(x.dtype))) for x in (a, b)]
        dtype = torch.promote_types(*kinds)
        if dtype in (torch.uint8, torch.int8, torch.int16):
            dtype = torch.int32
        to = pytorch_type_to_onnx_dtype(dtype)
        return (x if int(x.dtype) == to else op.Cast(x, to=to) for x in (a, b))

    def cat(tensors, dim=0):
        """In the widest dtype, without tensors of the shape (0,), which torch passes over."""
        joined = [x for x in tensors if list(x.shape) != [0]] or tensors[:1]
        kinds = [onnx_dtype_to_pytorch_dtype(int(x.dtype)) for x in tensors]
        to = pytorch_type_to_onnx_dtype(functools.reduce(torch.promote_types, kinds))
        joined = [x if int(x.dtype) == to else op.Cast(x, to=to) for x in joined]
        return op.Concat(*joined, axis=dim) if len(joined) > 1 else op.Identity(*joined)

    def whole(indices):
        """As int64, which all indices of a ScatterND or GatherND have to be."""
        made = []
        for index in indices:
            if index is not None and int(index.dtype) not in (onnx.TensorProto.BOOL, onnx.TensorProto.INT64):
                shape, index = index.shape, op.Cast(index, to=onnx.TensorProto.INT64)
                index.shape, index.dtype = shape, onnx_ir.DataType.INT64
            made.append(index)
        return made

    def index(self, indices):
        from onnxscript.function_libs.torch_lib.ops import core

        return core.aten_index(self, whole(indices))

    def index_put(self, indices, values, accumulate=False):
        """With a mask among several indices: the mask's places, column by column, beside the others' entries."""
        indices = whole(indices)
        masks = [index is not None and int(index.dtype) == onnx.TensorProto.BOOL for index in indices]
        if len(indices) == 1 or not any(masks) or any(
                index is None or not mask and len(index.shape) > 1 for index, mask in zip(indices, masks)):
            from onnxscript.function_libs.torch_lib.ops import core

            return core.aten_index_put(self, indices, values, accumulate)
        found = [op.Transpose(op.NonZero(index), perm=[1, 0]) if mask else op.Reshape(index, ints(-1, 1))
                 for index, mask in zip(indices, masks)]
        count = op.Shape(found[masks.index(True)], end=1)
        columns = [column if mask else op.Expand(column, op.Concat(count, ints(1), axis=0))
                   for column, mask in zip(found, masks)]
        axes = sum(len(index.shape) if mask else 1 for index, mask in zip(indices, masks))
        updates = op.Expand(values, op.Concat(count, op.Shape(self, start=axes), axis=0))
        return op.ScatterND(self, op.Concat(*columns, axis=1), updates, reduction="add" if accumulate else "none")

    def squeeze(self, dims):
        """Axes of one entry alone go; of others torch takes no notice."""
        rank = len(self.shape)
        axes = [dim for dim in dims if rank and self.shape[dim] == 1]
        return op.Squeeze(self, ints(*axes)) if axes else op.Identity(self)

    return _splits(op) | {aten.slice_scatter.default: slice_scatter, aten.roll.default: roll,
            aten.as_strided_scatter.default: as_strided_scatter,
            aten.searchsorted.Tensor: searchsorted, aten.cat.default: cat,
            aten.index.Tensor: index, aten.index_put.default: index_put,
            aten.squeeze.dim: lambda self, dim: squeeze(self, [dim]), aten.squeeze.dims: squeeze,
            aten.bucketize.Tensor: lambda self, boundaries, out_int32=False, right=False:
                searchsorted(boundaries, self, out_int32, right)}


def _splits(op: Operators) -> Table:
    """ONNX's Split rather than a sequence, which is no tensor."""

    def pieces(x, sizes, axis):
        even = -(-sum(sizes) // len(sizes))
        if len(sizes) == 1:
            return (op.Identity(x),)
        if all(size == even for size in sizes[:-1]):
            return tuple(op.Split(x, axis=axis, num_outputs=len(sizes)))
        # The number of outputs has no place beside sizes: export.py takes it off.
        return tuple(op.Split(x, op.Constant(value_ints=sizes), axis=axis, num_outputs=len(sizes)))

    def split(self, split_size, dim=0):
        length = self.shape[dim]
        if not isinstance(length, int) or not isinstance(split_size, int) or length == 0:
            return op.SplitToSequence(self, split_size, axis=dim)
        whole, rest = divmod(length, split_size)
        return pieces(self, [split_size] * whole + [rest] * (rest > 0), dim)

    def split_with_sizes(self, split_sizes, dim=0):
        if not all(isinstance(size, int) for size in split_sizes):
            sizes = op.Concat(*(op.Reshape(s, op.Constant(value_ints=[1])) for s in split_sizes), axis=0)
            return op.SplitToSequence(self, sizes, axis=dim)
        return pieces(self, list(split_sizes), dim)

    def unbind(self, dim=0):
        length = self.shape[dim]
        if not isinstance(length, int) or length == 0:
            return op.SplitToSequence(self, axis=dim, keepdims=False)
        axes = op.Constant(value_ints=[dim])
        return tuple(op.Squeeze(piece, axes) for piece in pieces(self, [1] * length, dim))

    return {
        aten.split.Tensor: split,
        aten.split_with_sizes.default: split_with_sizes,
        aten.unbind.int: unbind,
    }
