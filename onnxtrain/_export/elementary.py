"""Functions of which torch.onnx's own formula loses digits, or is another one at zeros, infinities and NaN.

translations.py adds this table to its own. A floored quotient comes from the exact remainder, as Python and torch have
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import onnx
import torch

from onnxtrain._torch import OpOverload

Value: TypeAlias = Any  # of the graph that is written: onnx_ir's, which adds and slices as a tensor does
Table = dict[OpOverload, Callable[..., Value]]  # what writes each operator, and returns its result or several
aten = torch.ops.aten


class Operators(Protocol):
    """Those of one domain: op.Add(x, y) writes a node, and returns its result or several."""

    def __getattr__(self, name: str) -> Callable[..., Value]: ...


def elementary(op: Operators, own: Operators) -> Table:
    """The translations, for operators of one opset and of our domain."""
    return _near_zero(op, own) | _logarithms(op, own) | _deviations(op) | _divisions(op, own) | _flat(op)


def constant(op: Operators, value: float, dtype: int) -> Value:
    """Of rank 0."""
    return op.Constant(value=onnx.helper.make_tensor("value", dtype, [], [value]))


def number(op: Operators, value: float, like: Value) -> Value:
    """A constant of rank 0 in the dtype of `like`."""
    return constant(op, value, int(like.dtype))


def _near_zero(op: Operators, own: Operators) -> Table:
    def signbit(self):
        zero = number(op, 0, self)
        if not self.dtype.is_floating_point():
            return op.Less(self, zero)
        return op.Or(op.Less(self, zero), op.And(op.Equal(self, zero), op.Less(op.Reciprocal(self), zero)))

    def safe_softmax(self, dim, dtype=-1):
        """Zeros where every entry is minus infinity, which is put aside: its slope is not a number."""
        if dtype not in (None, -1):
            self = op.Cast(self, to=int(dtype))
        axes, zero = op.Constant(value_ints=[dim]), number(op, 0, self)
        empty = op.Equal(op.ReduceMax(self, axes, keepdims=1), number(op, -math.inf, self))
        return op.Where(empty, zero, op.Softmax(op.Where(empty, zero, self), axis=dim))

    def expm1(self):
        return own.Expm1(self)

    def erfc(self):
        return own.Erfc(self)

    # Names of torch.special that torch.onnx translates keep them.
    return {aten.log1p.default: lambda self: own.Log1p(self),
            aten.expm1.default: expm1, aten.special_expm1.default: expm1,
            aten.erfc.default: erfc, aten.special_erfc.default: erfc,
            aten.lgamma.default: lambda self: own.Lgamma(self), aten.digamma.default: lambda self: own.Digamma(self),
            aten.erfinv.default: lambda self: own.Erfinv(self),
            aten.signbit.default: signbit, aten._safe_softmax.default: safe_softmax}


def _logarithms(op: Operators, own: Operators) -> Table:
    """The base with all its digits, no power that is infinite, and slopes at the ends of the range."""

    def to_base(base):
        """What lies within the rounding error of a whole number is that one: 8 has the logarithm 3."""

        def translate(self):
            quotient = op.Div(op.Log(self), number(op, math.log(base), self))
            errors: dict[int, float] = {onnx.TensorProto.FLOAT: 2.0**-22, onnx.TensorProto.DOUBLE: 2.0**-51}
            error = errors.get(int(self.dtype))
            if error is None:
                return quotient
            whole = op.Round(quotient)
            off = op.Sub(whole, quotient)
            near = op.LessOrEqual(op.Abs(off), op.Mul(op.Abs(whole), number(op, error, self)))
            return op.Add(quotient, own.StopGradient(op.Where(near, off, number(op, 0, self))))

        return translate

    def of_sum(unit):
        """log(exp(a) + exp(b)) is the larger one and softplus of minus the distance; `unit` is 1 in the base."""

        def translate(self, other):
            apart = op.Abs(op.Where(op.Equal(self, other), number(op, 0, self), op.Sub(self, other)))
            more = op.Softplus(op.Neg(apart if unit == 1 else op.Mul(apart, number(op, unit, self))))
            return op.Add(op.Max(self, other), more if unit == 1 else op.Div(more, number(op, unit, self)))

        return translate

    def logit(self, eps=None):
        """Flat beyond the ends; of NaN the slope is NaN."""
        if eps is not None:
            inside = op.Clip(self, number(op, eps, self), number(op, 1 - eps, self))
            self = op.Where(op.IsNaN(self), self, inside)
        return own.Logit(self)

    def entr(self):
        """At zero it is that of a root: zero, and of an infinite slope. At infinity, that of a line which falls."""
        zero, one, infinite = number(op, 0, self), number(op, 1, self), number(op, math.inf, self)
        at_zero, at_end = op.Equal(self, zero), op.Equal(self, infinite)
        x = op.Where(op.Or(at_zero, at_end), one, self)
        inside = op.Where(op.Less(x, zero), number(op, -math.inf, self), op.Neg(op.Mul(x, op.Log(x))))
        falling = op.Mul(op.Where(at_end, self, one), number(op, -math.inf, self))
        inside = op.Where(at_end, falling, inside)
        return op.Where(at_zero, op.Sqrt(op.Where(at_zero, self, one)), inside)

    return {aten.log2.default: to_base(2), aten.log10.default: to_base(10), aten.logaddexp.default: of_sum(1),
            aten.logaddexp2.default: of_sum(math.log(2)), aten.logit.default: logit, aten.special_entr.default: entr}


def _deviations(op: Operators) -> Table:
    """Flat where the variance is zero, as in eager, where the slope of its root is not a number."""

    def std(self, dim=None, correction=None, keepdim=False):
        correction = 1.0 if correction is None else correction
        axes = [op.Constant(value_ints=list(dim))] if dim is not None and len(dim) else []
        apart = op.Sub(self, op.ReduceMean(self, *axes, keepdims=1))
        variance = op.ReduceMean(op.Mul(apart, apart), *axes, keepdims=int(keepdim))
        if correction:  # of either sign; torch divides by nothing below zero
            results = op.Max(op.Size(variance), op.Constant(value_int=1))  # there may be none
            count = op.CastLike(op.Div(op.Size(self), results), self)
            rest = op.Max(op.Sub(count, number(op, correction, self)), number(op, 0, self))
            variance = op.Div(op.Mul(variance, count), rest)
        constant = op.Equal(variance, number(op, 0, self))
        return op.Where(constant, variance, op.Sqrt(op.Where(constant, number(op, 1, self), variance)))

    return {aten.std.correction: std}


def _divisions(op: Operators, own: Operators) -> Table:
    """Rounded quotients and remainders. By way of a rounded quotient, 1 // 0.1 is 10, not 9, and whole numbers beyond
    2**24 are others.
    """

    def pair(self, other):
        """A number that changes has float64, or no type yet, whatever the tensor's floats are."""
        like = other if isinstance(self, (bool, int, float)) else self
        self, other = (number(op, x, like) if isinstance(x, (bool, int, float)) else x for x in (self, other))
        is_other = like is self and is_float(self) and self.dtype != other.dtype
        return self, op.CastLike(other, self) if is_other else other

    def is_float(x):
        return x.dtype.is_floating_point()

    def truncated(self, other):
        quotient = op.Div(self, other)
        if not is_float(self):
            return quotient
        return op.Where(op.Less(quotient, number(op, 0, self)), op.Ceil(quotient), op.Floor(quotient))

    def floored(self, other):
        """One less than the quotient towards zero where that is not exact and negative."""
        zero, one = number(op, 0, self), number(op, 1, self)
        if not is_float(self):
            quotient = op.Div(self, other)
            rest = op.Sub(self, op.Mul(quotient, other))
            return op.Add(quotient, op.Min(op.Mul(op.Sign(rest), op.Sign(other)), zero))
        if int(self.dtype) in _HALVES:
            wide = op.Cast(self, to=onnx.TensorProto.FLOAT), op.Cast(other, to=onnx.TensorProto.FLOAT)
            return op.CastLike(floored(*wide), self)
        rest, quotient = op.Mod(self, other, fmod=1), op.Floor(op.Div(self, other))
        whole = op.Div(op.Sub(self, rest), other)
        nearest = op.Round(op.Where(op.Equal(rest, own.Remainder(self, other)), whole, op.Sub(whole, one)))
        nearest = op.Where(op.Equal(nearest, zero), op.Mul(quotient, zero), nearest)  # with the sign of the quotient
        return op.Where(op.Equal(other, zero), quotient, nearest)

    def remainder(self, other):
        self, other = pair(self, other)
        return own.Remainder(self, other) if is_float(self) else op.Mod(self, other)

    def divide(self, other, rounding_mode=None):
        self, other = pair(self, other)
        if rounding_mode is None:
            if not is_float(self):
                default = DEFAULTS[torch.get_default_dtype()]
                self, other = op.Cast(self, to=default), op.Cast(other, to=default)
            return op.Div(self, other)
        return floored(self, other) if rounding_mode == "floor" else truncated(self, other)

    def floor_divide(self, other):
        return floored(*pair(self, other))

    return {aten.div.Tensor_mode: divide, aten.div.Scalar_mode: divide, aten.floor_divide.default: floor_divide,
            aten.remainder.Tensor: remainder, aten.remainder.Scalar: remainder, aten.remainder.Scalar_Tensor: remainder}


_HALVES = {int(onnx.TensorProto.FLOAT16), int(onnx.TensorProto.BFLOAT16)}
DEFAULTS = {torch.float32: onnx.TensorProto.FLOAT, torch.float64: onnx.TensorProto.DOUBLE,
            torch.float16: onnx.TensorProto.FLOAT16, torch.bfloat16: onnx.TensorProto.BFLOAT16}


def _flat(op: Operators) -> Table:
    """Functions whose slope is zero everywhere: eager's gradient is zeros then, and not none."""

    def fill(self, value):
        """What a tensor is filled with has a gradient of ones, what was there one of zeros."""
        never = constant(op, False, onnx.TensorProto.BOOL)
        filling = number(op, value, self) if isinstance(value, (bool, int, float)) else op.CastLike(value, self)
        return op.Where(never, self, filling)

    def angle(self):
        """Of a negative number pi, of others zero."""
        sign = op.Sign(self)
        turned = op.Mul(op.Sub(op.Abs(sign), sign), number(op, math.pi / 2, self))
        return op.Where(op.IsNaN(self), number(op, math.nan, self), turned)

    def heaviside(self, values):
        """Of NaN zero."""
        zero = number(op, 0, self)
        return op.Where(op.Equal(self, zero), values, op.Cast(op.Greater(self, zero), to=int(self.dtype)))

    return {aten.fill.Scalar: fill, aten.fill.Tensor: fill, aten.zero.default: lambda self: fill(self, 0),
            aten.angle.default: angle, aten.heaviside.default: heaviside}
