"""Translations of operators for which torch.onnx ignores an argument, and so gives other numbers, or accepts a negative
index that torch refuses.

translations.py adds this table to its own. An argument that ONNX cannot express raises an error that names it, and the
module runs in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from onnxtrain._export import autograd_functions
from onnxtrain._export.elementary import Operators, Table, Value, number
from onnxtrain._export.errors import Untraceable

aten = torch.ops.aten


def arguments(op: Operators, own: Operators) -> Table:
    """The translations, for operators of one opset and of our domain."""
    return _windows(op, own) | _grids(op) | _scatters(op, own) | _lookups(op, own)


def _each(value: int | Sequence[int], rank: int) -> list[int]:
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * rank if len(values) == 1 else values


def _batched(op: Operators, x: Value, rank: int, apply: Callable[[Value], Value]) -> Value:
    """`apply` on (batch, channels, ...), also where x has no batch."""
    if len(x.shape) == rank + 2:
        return apply(x)
    zero = op.Constant(value_ints=[0])
    return op.Squeeze(apply(op.Unsqueeze(x, zero)), zero)


def _sizes(op: Operators, sizes: Sequence[Value]) -> Value:
    """Numbers, some of them perhaps made of sizes, in one row."""
    if all(isinstance(size, int) for size in sizes):
        return op.Constant(value_ints=list(sizes))
    one = op.Constant(value_ints=[1])
    return op.Concat(*(op.Reshape(size, one) for size in sizes), axis=0)


def _grids(op: Operators) -> Table:
    """An operator of opset 20, which torch.onnx writes as sums over elementwise products."""
    if not hasattr(op, "AffineGrid"):
        return {}
    return {aten.affine_grid_generator.default: lambda theta, size, align_corners: op.AffineGrid(
        theta, _sizes(op, size), align_corners=int(align_corners))}


def _windows(op: Operators, own: Operators) -> Table:
    """divisor_override, adaptive means of any size, and a convolution of three dims without bias."""

    def avg_pool(rank: int) -> Callable[..., Value]:
        def pool(self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True,
                 divisor_override=None):
            kernel = _each(kernel_size, rank)
            strides = _each(stride, rank) if stride else kernel
            pads = _each(padding, rank) * 2

            def apply(x):
                if divisor_override is None:
                    return op.AveragePool(
                        x, kernel_shape=kernel, strides=strides, pads=pads, ceil_mode=int(ceil_mode),
                        count_include_pad=int(count_include_pad),
                    )
                if ceil_mode:
                    raise Untraceable("The module uses avg_pool with divisor_override and ceil_mode, which ONNX cannot "
                                      "express.")
                # With padding counted every window has the kernel's size, so that its sum is its mean times that.
                mean = op.AveragePool(x, kernel_shape=kernel, strides=strides, pads=pads, count_include_pad=1)
                return op.Mul(mean, number(op, math.prod(kernel) / divisor_override, x))

            return _batched(op, self, rank, apply)

        return pool

    def adaptive_avg_pool(rank: int) -> Callable[..., Value]:
        def pool(self, output_size):
            whole = list(self.shape[-rank:])
            if all(isinstance(n, int) and n > 0 for n in (*whole, *output_size)) and not any(
                    n % size for n, size in zip(whole, output_size)):
                return avg_pool(rank)(self, [n // size for n, size in zip(whole, output_size)])
            return _batched(op, self, rank, lambda x: own.AdaptiveAveragePool(x, _sizes(op, output_size)))

        return pool

    def adaptive_max_pool(name: str) -> tuple[object, Callable[..., Value]]:
        """torch.onnx shares out among equals the gradient of the only cell; it goes to the first."""
        overload = getattr(aten, name).default
        by_torch = autograd_functions.run_by_torch((f"aten.{name}.default",))[overload]

        def pool(self, output_size):
            rank = len(output_size)
            if any(size != 1 for size in output_size):
                return by_torch(self, output_size)
            row = op.Concat(op.Shape(self, end=-rank), op.ReduceProd(op.Shape(self, start=-rank), keepdims=1), axis=0)
            at = op.ArgMax(op.Reshape(self, row, allowzero=1), axis=-1, keepdims=1)
            return (_batched(op, self, rank, op.GlobalMaxPool),
                    op.Unsqueeze(at, op.Constant(value_ints=[-1] * (rank - 1))) if rank > 1 else at)

        return overload, pool

    def conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        return _batched(op, input, 3, lambda x: op.Conv(
            x, weight, bias, strides=_each(stride, 3), pads=_each(padding, 3) * 2, dilations=_each(dilation, 3),
            group=groups
        ))

    return {aten.avg_pool2d.default: avg_pool(2), aten.avg_pool3d.default: avg_pool(3), aten.conv3d.default: conv3d,
            aten._adaptive_avg_pool2d.default: adaptive_avg_pool(2),
            aten._adaptive_avg_pool3d.default: adaptive_avg_pool(3),
            **dict(map(adaptive_max_pool, ("adaptive_max_pool2d", "adaptive_max_pool3d")))}


def _scatters(op: Operators, own: Operators) -> Table:
    """Means, which ONNX's operator does not know, and reductions that leave out what was there."""
    reductions = {"sum": "add", "mean": "add", "prod": "mul", "amin": "min", "amax": "max"}
    neutral = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amin": math.inf, "amax": -math.inf}

    def scatter_reduce(self, dim, index, src, reduce, include_self=True):
        if len(self.shape) == 0:
            one, none = op.Constant(value_ints=[1]), op.Constant(value_ints=[0])
            self, index, src = (op.Reshape(x, one) for x in (self, index, src))
            return op.Squeeze(scatter_reduce(_Ranked(self, src), 0, index, src, reduce, include_self), none)
        self = getattr(self, "value", self)
        if not include_self:
            if not src.dtype.is_floating_point() and reduce in ("amin", "amax"):
                raise Untraceable("The module uses scatter_reduce of integers with include_self=False, which ONNX "
                                  "cannot express.")
            start = op.Expand(number(op, neutral[reduce], src), op.Shape(index))
            self = own.TorchScatterElements(self, index, start, axis=dim)
        total = own.TorchScatterElements(self, index, _part(op, src, index), axis=dim, reduction=reductions[reduce])
        if reduce != "mean":
            return total
        if not src.dtype.is_floating_point():
            raise Untraceable("The module uses scatter_reduce('mean') of integers, whose rounding ONNX cannot express.")
        one = number(op, 1.0, src)
        counts = op.Expand(one if include_self else number(op, 0.0, src), op.Shape(self))
        counts = op.ScatterElements(counts, index, op.Expand(one, op.Shape(index)), axis=dim, reduction="add")
        return op.Div(total, op.Max(counts, one))

    def scatter(self, dim, index, src, reduction="none"):
        rank = len(self.shape)
        one = op.Constant(value_ints=[1])
        self, index, src = (x if len(x.shape) else op.Reshape(x, one) for x in (self, index, src))
        y = own.TorchScatterElements(self, index, _part(op, src, index), axis=dim, reduction=reduction)
        return y if rank else op.Squeeze(y, op.Constant(value_ints=[0]))

    def scatter_value(self, dim, index, value):
        rank, one = len(self.shape), op.Constant(value_ints=[1])
        self, index = (x if len(x.shape) else op.Reshape(x, one) for x in (self, index))
        y = own.TorchScatterElements(self, index, op.Expand(number(op, value, self), op.Shape(index)), axis=dim)
        return y if rank else op.Squeeze(y, op.Constant(value_ints=[0]))

    return {aten.scatter_reduce.two: scatter_reduce, aten.scatter.src: scatter, aten.scatter.value: scatter_value,
            aten.scatter_add.default: lambda self, dim, index, src: scatter(self, dim, index, src, "add")}


class _Ranked:
    """A value of rank 1 in place of one of rank 0."""

    def __init__(self, value: Value, like: Value) -> None:
        self.value, self.dtype, self.shape = value, like.dtype, (1,)


def _part(op: Operators, src: Value, index: Value) -> Value:
    """torch reads as much of src as index covers; ONNX wants them to be of one shape."""
    if src.shape is not None and index.shape is not None and list(src.shape) == list(index.shape):
        return src
    axes = op.Constant(value_ints=list(range(len(src.shape))))
    starts = op.Constant(value_ints=[0] * len(src.shape))
    return op.Slice(src, starts, op.Shape(index), axes)


def _lookups(op: Operators, own: Operators) -> Table:
    """Lookups by indices that do not count from the end."""

    def index_select(self, dim, index):
        row = op.Constant(value_ints=[-1])
        y = own.TorchGather(self if len(self.shape) else op.Reshape(self, row), op.Reshape(index, row), axis=dim)
        return y if len(self.shape) else op.Reshape(y, op.Constant(value_ints=[]))

    def gather(self, dim, index, sparse_grad=False):
        if len(self.shape) and len(index.shape):
            return own.TorchGatherElements(self, index, axis=dim)
        row = op.Constant(value_ints=[-1])
        flat = own.TorchGatherElements(op.Reshape(self, row), op.Reshape(index, row), axis=0)
        return op.Reshape(flat, op.Shape(index))

    by_torch = autograd_functions.run_by_torch(("aten.embedding.default", "aten._embedding_bag.default"))

    def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
        # F.embedding's own padding is replaced before it comes here.
        if sparse or scale_grad_by_freq or padding_idx >= 0:
            return by_torch[aten.embedding.default](weight, indices, padding_idx, scale_grad_by_freq, sparse)
        return own.TorchGather(weight, indices, axis=0)

    return by_torch | {aten.embedding.default: embedding, aten.index_select.default: index_select,
                       aten.gather.default: gather}
