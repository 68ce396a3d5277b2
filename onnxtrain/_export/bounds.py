"""Clamps, hard tanh and soft shrink: slopes where their pieces meet, as the installed torch has them.

translations.py adds this table to its own.
"""

from __future__ import annotations

import math

import onnx
import torch

from onnxtrain._export.decompositions import FLAT_BOUNDS
from onnxtrain._export.elementary import Operators, Table, constant, number

aten = torch.ops.aten


def bounds(op: Operators, own: Operators) -> Table:
    """The translations, for operators of one opset and of our domain.

    A hard tanh is flat at its bounds; a clamp is since torch 2.14.
    """

    def hardtanh(self, min_val=-1.0, max_val=1.0):
        return own.HardTanh(self, number(op, min_val, self), number(op, max_val, self))

    def softshrink(self, lambd=0.5):
        """Flat between the ends alone: NaN has a slope."""
        limit, zero = number(op, lambd, self), number(op, 0, self)
        flat = op.And(op.GreaterOrEqual(self, op.Neg(limit)), op.LessOrEqual(self, limit))
        return op.Where(flat, zero, op.Where(op.Greater(self, zero), op.Sub(self, limit), op.Add(self, limit)))

    def bound(value, like):
        if value is None or isinstance(value, (bool, int, float)):
            return None if value is None else number(op, value, like)
        return op.CastLike(value, like)  # made of sizes

    def clamp(self, min=None, max=None):
        if any(isinstance(value, float) and math.isnan(value) for value in (min, max)):
            return op.Where(constant(op, True, onnx.TensorProto.BOOL),
                            number(op, math.nan, self), self)
        low, high = bound(min, self), bound(max, self)
        clipped = op.Clip(self, low, high)
        if not FLAT_BOUNDS or not self.dtype.is_floating_point():
            return clipped
        inside = [*(() if low is None else (op.Greater(self, low),)), *(() if high is None else (op.Less(self, high),))]
        return op.Where(inside[0] if len(inside) == 1 else op.And(*inside), self, own.StopGradient(clipped))

    def isnumber(value):
        maker = value.producer()
        return maker is not None and maker.op_type == "Constant" and value.const_value is not None and not value.shape

    def shared(self, min, max, nan):
        """Of a tensor that equals a bound, each has half of the gradient. Beside a NaN, the tensor has all of it."""
        if max is None or min is None:
            return op.Max(self, min) if max is None else op.Min(self, max)
        half = number(op, 0.5, self)
        below, above = op.Less(self, min), op.Greater(self, max)
        at_min, at_max = op.Equal(self, min), op.Equal(self, max)
        result = op.Where(below, min, op.Where(above, max, self))
        result = op.Where(at_max, op.Add(op.Mul(self, half), op.Mul(max, half)), result)
        result = op.Where(at_min, op.Add(op.Mul(self, half), op.Mul(min, half)), result)
        result = op.Where(op.And(at_min, at_max), self, result)
        result = op.Where(op.And(op.Less(max, min), op.Equal(self, self)), max, result)
        numbers = op.And(op.Equal(min, min), op.Equal(max, max))
        return op.Where(numbers, result, op.Where(op.Or(below, above), nan, op.Add(self, nan)))

    def clamp_tensor(self, min=None, max=None):
        """If either side is NaN, neither has a gradient. Type promotion makes constants of numbers."""
        if all(value is None or isnumber(value) for value in (min, max)):
            return clamp(self, *(value and value.const_value.numpy().item() for value in (min, max)))
        if not self.dtype.is_floating_point():
            self = self if min is None else op.Where(op.Less(self, min), min, self)
            return self if max is None else op.Where(op.Greater(self, max), max, self)
        nan = number(op, math.nan, self)
        if FLAT_BOUNDS:
            return shared(self, min, max, nan)
        if max is None:
            return op.Where(op.GreaterOrEqual(self, min), self, op.Where(op.Less(self, min), min, nan))
        if min is None:
            return op.Where(op.LessOrEqual(self, max), self, op.Where(op.Greater(self, max), max, nan))
        inside = op.And(op.GreaterOrEqual(self, min), op.LessOrEqual(self, max))
        above = op.Or(op.Greater(self, max), op.Less(max, min))
        below = op.Less(self, min)
        level = op.Where(op.And(below, op.Equal(min, max)), own.StopGradient(min), nan)  # flat, for torch
        low = op.Where(op.And(below, op.Less(min, max)), min, level)
        high = op.Where(op.And(above, op.Equal(self, self)), op.Where(op.Equal(min, min), max, nan), low)
        return op.Where(inside, self, high)

    return {
        aten.hardtanh.default: hardtanh,
        aten.softshrink.default: softshrink,
        aten.relu6.default: lambda self: hardtanh(self, 0.0, 6.0),
        aten.clamp.default: clamp,
        aten.clamp_min.default: lambda self, min: clamp(self, min=min),
        aten.clamp_max.default: lambda self, max: clamp(self, max=max),
        aten.clamp.Tensor: clamp_tensor,
        aten.clamp_min.Tensor: lambda self, min: clamp_tensor(self, min=min),
        aten.clamp_max.Tensor: lambda self, max: clamp_tensor(self, max=max),
    }
