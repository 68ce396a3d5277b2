"""Functions of torch that draw random numbers: in the order of memory that eager has (lay_out), and by operators of the
engine, for modules that are not on the CPU, where torch draws (autograd_functions.drawn_by_torch).

torch.onnx samples with replacement whatever is asked for, draws whole numbers from 24 bits, and gives a number an axis.
"""

from __future__ import annotations

import itertools
from typing import Any

import onnx
import torch

from onnxtrain._export import autograd_functions
from onnxtrain._export.captured import is_dense, order_of
from onnxtrain._export.elementary import Operators, Table, constant
from onnxtrain.utils.torch_io_helper import pytorch_type_to_onnx_dtype

aten = torch.ops.aten
FLOAT, DOUBLE, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64
_FILLS: dict[object, str] = {  # and the method that fills memory with the same numbers
    aten.randn_like.default: "normal_", aten.rand_like.default: "uniform_", aten.randint_like.default: "random_",
    aten.randint_like.low_dtype: "random_", aten.normal_functional.default: "normal_", aten.uniform.default: "uniform_",
    aten.exponential.default: "exponential_", aten.cauchy.default: "cauchy_", aten.log_normal.default: "log_normal_",
    aten.geometric.default: "geometric_"}
_NUMBERS = ("low", "high", "mean", "std", "from", "to", "lambd", "median", "sigma", "p")


def lay_out(graph: torch.fx.Graph) -> None:
    """Draws into memory whose order is not that of the dimensions: torch fills it in the order of memory, while the
    engine's tensors have the order of dimensions.
    """
    for node in list(graph.nodes):
        fill = _FILLS.get(node.target)
        if fill is None or node.meta["val"].device.type != "cpu":
            continue
        filled = node.meta["val"] if node.target._schema.name.endswith("_like") else node.args[0].meta["val"]
        given: dict[str, Any] = {}
        for argument, value in itertools.zip_longest(node.target._schema.arguments, node.args):
            if argument.name in _NUMBERS:
                default = argument.default_value if value is None else value
                given[argument.name] = node.kwargs.get(argument.name, default)
        order = order_of(filled)
        if order is None or 0 in filled.stride() or is_dense(filled) or any(
                isinstance(value, torch.fx.Node) for value in given.values()):
            continue
        numbers = [0.0] * (list(given) == ["high"]) + [float(value) for value in given.values()]
        node.target, node.kwargs = torch.ops.onnxtrain.drawn_like.default, {"dtype": node.meta["val"].dtype}
        node.args = (node.args[0], fill, numbers, list(order), is_dense(filled, order))


def draws(op: Operators) -> Table:
    """The translations, for operators of one opset."""
    return _numbers(op) | _integers(op) | _samples(op)


def _given(dtype: int | None, otherwise: int) -> int:
    return otherwise if dtype is None or dtype == -1 else int(dtype)


def _numbers(op: Operators) -> Table:
    def default() -> int:
        return pytorch_type_to_onnx_dtype(torch.get_default_dtype())

    def normal(like, mean, std, dtype):
        """A float64's mean and deviation are operands: attributes have 32 bits."""
        if dtype != DOUBLE:
            return op.RandomNormalLike(like, mean=mean, scale=std, dtype=dtype)
        drawn = op.RandomNormalLike(like, dtype=dtype)
        return op.Add(op.Mul(drawn, constant(op, std, dtype)), constant(op, mean, dtype))

    def uniform(self, low=0.0, high=1.0):
        """What is rounded to the end that does not belong to the range becomes the other one."""
        dtype = int(self.dtype)
        first, end, width = (constant(op, value, dtype) for value in (low, high, high - low))
        drawn = op.Add(op.Mul(op.RandomUniformLike(self, dtype=dtype), width), first)
        return op.Where(op.Equal(drawn, end), first, drawn)

    def rand(size, dtype=None, **_):
        return op.RandomUniformLike(op.ConstantOfShape(size), dtype=_given(dtype, default()))

    def randn(size, dtype=None, **_):
        return op.RandomNormalLike(op.ConstantOfShape(size), dtype=_given(dtype, default()))

    def normal_float_float(mean, std, size, dtype=None, **_):
        return normal(op.ConstantOfShape(size), mean, std, _given(dtype, default()))

    def bernoulli_p(self, p=0.5):
        return op.Cast(op.Less(op.RandomUniformLike(self, dtype=DOUBLE), constant(op, p, DOUBLE)), to=int(self.dtype))

    return {
        aten.rand.default: rand,
        aten.randn.default: randn,
        aten.rand_like.default: lambda self, dtype=None, **_: op.RandomUniformLike(
            self, dtype=_given(dtype, int(self.dtype))),
        aten.randn_like.default: lambda self, dtype=None, **_: op.RandomNormalLike(
            self, dtype=_given(dtype, int(self.dtype))),
        aten.uniform.default: uniform,
        aten.normal.float_float: normal_float_float,
        aten.normal_functional.default: lambda self, mean=0.0, std=1.0: normal(self, mean, std, int(self.dtype)),
        aten.bernoulli.default: lambda self: op.Bernoulli(self),
        aten.bernoulli.p: bernoulli_p,
    }


def _integers(op: Operators) -> Table:
    """From float64, which has 53 bits."""

    def between(like, low, high, dtype):
        first, end = (op.Cast(bound, to=DOUBLE) for bound in (low, high))
        drawn = op.Mul(op.RandomUniformLike(like, dtype=DOUBLE), op.Sub(end, first))
        return op.Cast(op.Add(op.Floor(drawn), first), to=dtype)

    return {
        aten.randint.default: lambda high, size, dtype=None, **_: between(
            op.ConstantOfShape(size), 0, high, _given(dtype, INT64)),
        aten.randint.low: lambda low, high, size, dtype=None, **_: between(
            op.ConstantOfShape(size), low, high, _given(dtype, INT64)),
        aten.randint_like.default: lambda self, high, dtype=None, **_: between(
            self, 0, high, _given(dtype, int(self.dtype))),
        aten.randint_like.low_dtype: lambda self, low, high, dtype=None, **_: between(
            self, low, high, _given(dtype, int(self.dtype))),
    }


def _samples(op: Operators) -> Table:
    by_torch = autograd_functions.run_by_torch(("aten.multinomial.default",))[aten.multinomial.default]

    def multinomial(self, num_samples, replacement=False):
        """Without replacement, the classes that are first where each waits for a time with its own rate, as torch has
        it.
        """
        if not isinstance(num_samples, int):
            return by_torch(self, num_samples, replacement)
        one_row, axis = len(self.shape) == 1, op.Constant(value_ints=[0])
        rows = op.Unsqueeze(self, axis) if one_row else self
        if replacement or num_samples == 1:
            chosen = op.Multinomial(op.Log(rows), dtype=INT64, sample_size=num_samples)
        else:
            least = constant(op, 2.0**-54, DOUBLE)  # half the step of the uniform numbers
            uniform = op.RandomUniformLike(rows, dtype=DOUBLE)
            times = op.Max(op.Neg(op.Log(op.Sub(constant(op, 1, DOUBLE), uniform))), least)
            rates = op.Div(op.Cast(rows, to=DOUBLE), times)
            chosen = op.TopK(rates, op.Constant(value_ints=[num_samples]), axis=-1)[1]
        return op.Squeeze(chosen, axis) if one_row else chosen

    return {aten.multinomial.default: multinomial}
