"""What stands in the place of torch.onnx's own translation where that has other values, other slopes or a sequence.

translations() is the custom_translation_table of torch.onnx.export; one function here for each kind of reason.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterator

import onnx
import torch

from onnxtrain import _torch
from onnxtrain._export import autograd_functions
from onnxtrain._export.arguments import arguments
from onnxtrain._export.bounds import bounds
from onnxtrain._export.domain import DOMAIN, DOMAIN_VERSION, MICROSOFT
from onnxtrain._export.draws import draws
from onnxtrain._export.elementary import DEFAULTS, Operators, Table, Value, constant, elementary, number
from onnxtrain._export.errors import Untraceable
from onnxtrain._export.packed_sequences_onnx import packed
from onnxtrain._export.slices import slices
from onnxtrain._export.state import wrapped
from onnxtrain.utils.torch_io_helper import onnx_dtype_to_pytorch_dtype, pytorch_type_to_onnx_dtype

aten = torch.ops.aten
INTEGERS = {getattr(onnx.TensorProto, name) for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16",
                                                         "UINT32", "UINT64")}


# Of the first two torch.onnx's formulas have no right digit far from zero; decompositions leave no form of the others.
_RUN_BY_TORCH = ("special_erfcx", "special_log_ndtr", "i0", "igamma", "igammac", "special_bessel_j0",
                 "special_bessel_j1", "special_i0e", "special_i1", "special_i1e", "special_ndtri",
                 "special_spherical_bessel_j0", "special_zeta")


def translations(opset: int) -> Table:
    """The custom_translation_table of torch.onnx.export, for operators of the opset of that number."""
    import onnxscript

    op = getattr(onnxscript, f"opset{opset}")
    own = onnxscript.values.Opset(DOMAIN, DOMAIN_VERSION)
    python_op = {torch.ops.onnxtrain.python_op.default: autograd_functions.translation()}
    python_op |= autograd_functions.run_by_torch([f"aten.{name}.default" for name in _RUN_BY_TORCH])
    return (_own(op, own) | _groups(op, own) | bounds(op, own) | _functions(op, own) | _numbers(op)
            | _wider(op) | elementary(op, own) | arguments(op, own) | _picked(op, own) | _resized(op) | _reshaped(op)
            | slices(op, own) | packed(op, own) | draws(op) | python_op)


def promoted(op: Operators, *operands: Value) -> tuple[Value, ...]:
    """Two operands as torch promotes them."""
    kinds = [torch.empty([1] * len(x.shape or ()), dtype=onnx_dtype_to_pytorch_dtype(int(x.dtype)), device="meta")
             for x in operands]
    dtype = pytorch_type_to_onnx_dtype(torch.result_type(*kinds))
    return tuple(x if int(x.dtype) == dtype else op.Cast(x, to=dtype) for x in operands)


def _own(op: Operators, own: Operators) -> Table:
    """Operators of torch.ops.onnxtrain, detach(), and item(), whose number has no gradient."""

    def stop_gradient(x):
        return own.StopGradient(x)

    def item(x):
        from onnxscript.function_libs.torch_lib.ops import core

        if not x.dtype.is_floating_point():
            return core.aten__local_scalar_dense(x)
        return op.Cast(op.Gather(op.Reshape(own.StopGradient(x), [-1]), 0), to=onnx.TensorProto.DOUBLE)

    def batch_norm(x, weight=None, bias=None, eps=1e-5):
        # momentum 0 makes the second and third output the batch statistics, whatever the running ones are; these have
        # the running ones' dtype, float32 for 16-bit x
        channels = op.Shape(x, start=1, end=2)
        one, zero = (op.Expand(op.CastLike(op.Constant(value_float=v), x), channels) for v in (1.0, 0.0))
        var, mean = one, zero
        if int(x.dtype) != onnx.TensorProto.DOUBLE:
            var, mean = (op.Expand(op.Constant(value_float=v), channels) for v in (1.0, 0.0))
        return op.BatchNormalization(
            x, one if weight is None else weight, zero if bias is None else bias, mean, var,
            epsilon=eps, momentum=0.0, training_mode=1,
        )

    def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
        """One operator, whose scale and bias are per channel as ONNX's are from opset 21 on."""
        channels = op.Shape(input, start=1, end=2)
        one, zero = (op.Expand(op.CastLike(op.Constant(value_float=v), input), channels) for v in (1.0, 0.0))
        return own.GroupNorm(input, one if weight is None else weight, zero if bias is None else bias,
                             groups=num_groups, epsilon=eps)

    def linear(x, weight, bias):
        return op.Gemm(x, weight, transB=1) if bias is None else op.Gemm(x, weight, bias, transB=1)

    def lstm_cell(input, hidden, state, w_ih, w_hh, b_ih=None, b_hh=None):
        gates = op.Add(linear(hidden, w_hh, b_hh), linear(input, w_ih, b_ih))
        enter, forget, new, leave = op.Split(gates, axis=1, num_outputs=4)
        state = op.Add(op.Mul(op.Sigmoid(forget), state), op.Mul(op.Sigmoid(enter), op.Tanh(new)))
        return op.Mul(op.Sigmoid(leave), op.Tanh(state)), state

    def gru_cell(input, state, w_ih, w_hh, b_ih=None, b_hh=None):
        (reset, update, new), (of_reset, of_update, of_new) = (
            op.Split(x, axis=1, num_outputs=3) for x in (linear(input, w_ih, b_ih), linear(state, w_hh, b_hh)))
        kept = op.Sigmoid(op.Add(of_update, update))
        new = op.Tanh(op.Add(new, op.Mul(of_new, op.Sigmoid(op.Add(of_reset, reset)))))
        return op.Add(op.Mul(op.Sub(state, new), kept), new)

    def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
        return own.CTCLoss(log_probs, targets, input_lengths, target_lengths, blank=blank,
                           zero_infinity=int(zero_infinity))

    def matmul_bnb4(a, b, absmax, n, k, block_size, quant_type, grad_weight_dtype):
        import onnxscript

        more = {"grad_weight_dtype": grad_weight_dtype} if grad_weight_dtype else {}
        return onnxscript.values.Opset(MICROSOFT, 1).MatMulBnb4(a, b, absmax, N=n, K=k, block_size=block_size,
                                                                quant_type=quant_type, **more)

    return {
        torch.ops.onnxtrain.ctc_loss.default: ctc_loss,
        torch.ops.onnxtrain.matmul_bnb4.default: matmul_bnb4,
        aten.detach.default: stop_gradient,
        aten.item.default: item,
        aten._local_scalar_dense.default: item,
        torch.ops.onnxtrain.in_range.default: lambda x, limit: own.InRange(x, limit),
        torch.ops.onnxtrain.batch_norm.default: batch_norm,
        torch.ops.onnxtrain.lstm_cell.default: lstm_cell,
        torch.ops.onnxtrain.gru_cell.default: gru_cell,
        aten.group_norm.default: group_norm,
    }


def _groups(op: Operators, own: Operators) -> Table:
    """Mixtures of experts; transformers has its own operator for code that torch.compile cannot trace."""

    def grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None):
        if offs is None or bias is not None or len(self.shape) != 2 or len(mat2.shape) != 3:
            raise Untraceable("The module calls grouped_mm with operands other than groups of rows and one matrix for "
                              "each group.")
        maker = mat2.producer()
        if maker is not None and maker.op_type == "Transpose" and list(maker.attributes["perm"].as_ints()) == [0, 2, 1]:
            y = own.GroupedMatMul(self, maker.inputs[0], offs, transB=1)  # matrices are read as they are stored
        else:
            y = own.GroupedMatMul(self, mat2, offs)
        return y if out_dtype is None else op.Cast(y, to=int(out_dtype))

    table: Table = {aten._grouped_mm.default: grouped_mm, torch.ops.onnxtrain.grouped_mm.default: grouped_mm}
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        fallback = torch.ops.transformers.grouped_mm_fallback.default
        table[fallback] = lambda input, weight, offs: grouped_mm(input, weight, offs)
    return table


def _functions(op: Operators, own: Operators) -> Table:
    """Functions whose own translation lacks a dtype, or is not a number where the function is one."""

    def pad(self, pad, mode="constant", value=None):
        from onnxscript.function_libs.torch_lib.ops import nn

        if mode == "circular" and any(isinstance(n, int) and n < 0 for n in pad):
            raise Untraceable("The module pads with mode 'circular' by a negative size, which ONNX defines "
                              "differently.")
        return nn.aten_pad(self, pad, mode, value)

    def dropout(self, p, train):
        """Of nothing and of all: no number is drawn for those."""
        from onnxscript.function_libs.torch_lib.ops import core

        if not train or p == 0.0:
            return op.Identity(self)
        return op.Mul(self, number(op, 0, self)) if p == 1.0 else core.aten_dropout(self, p, train)

    def native_dropout(self, p, train=True):
        """What decompositions make of it."""
        from onnxscript.function_libs.torch_lib.ops import core

        if train and 0.0 < p < 1.0:
            return core.aten_native_dropout(self, p, train)
        kept = onnx.helper.make_tensor("kept", onnx.TensorProto.BOOL, [1], [not train or p == 0.0])
        return dropout(self, p, train), op.ConstantOfShape(op.Shape(self), value=kept)

    def celu(self, alpha=1.0):
        """ONNX has it for float32 alone."""
        if alpha == 1.0:
            return op.Elu(self)
        scale = number(op, alpha, self)
        return op.Mul(scale, op.Elu(op.Div(self, scale)))

    def sinc(self):
        """torch.onnx divides by zero where it then takes another value, and the slope there is not a number."""
        one, none = number(op, 1, self), op.Equal(self, number(op, 0, self))
        angle = op.Mul(op.Where(none, one, self), number(op, math.pi, self))
        return op.Where(none, one, op.Div(op.Sin(angle), angle))

    def atan2(self, other):
        if not self.dtype.is_floating_point() or self.dtype != other.dtype:
            raise Untraceable("The module uses atan2 of integers, or of two dtypes.")
        return own.Atan2(self, other)

    def cumprod(self, dim, dtype=-1):
        if dtype in (None, -1):
            dtype = self.dtype if self.dtype.is_floating_point() else onnx.TensorProto.INT64
        x = op.Cast(self, to=int(dtype))
        return own.TorchCumProd(x, op.Constant(value_int=dim)) if len(self.shape) else x

    def infinite(**signs):
        """float64 stays as it is: beyond the range of float32 there are finite numbers."""
        def translate(self):
            wide = int(self.dtype) == onnx.TensorProto.DOUBLE
            return op.IsInf(self if wide else op.Cast(self, to=onnx.TensorProto.FLOAT), **signs)

        return translate

    def truth(extremum):
        """Of no entry the extremum is the end of the range, so that it is compared with zero. Of uint8 torch's result
        is one as well.
        """
        def translate(self, dim=None, keepdim=False):
            boolean = op.Cast(self, to=onnx.TensorProto.BOOL)
            if len(self.shape):
                axes = [dim] if isinstance(dim, int) else list(dim or ())
                numbers = op.Cast(boolean, to=onnx.TensorProto.INT64)
                found = extremum(numbers, *([op.Constant(value_ints=axes)] if axes else []), keepdims=int(keepdim))
                boolean = op.Greater(found, op.Constant(value_int=0))
            return op.Cast(boolean, to=int(self.dtype)) if int(self.dtype) == onnx.TensorProto.UINT8 else boolean

        return translate

    def shifted(direction):
        """torch.onnx makes signed numbers of unsigned ones."""
        def translate(self, other):
            from onnxscript.function_libs.torch_lib.ops import core

            like = other if isinstance(self, int) else self
            self, other = (number(op, x, like) if isinstance(x, int) else x for x in (self, other))
            if like.dtype.is_signed():
                return getattr(core, f"aten_bitwise_{direction}_shift")(self, other)
            return op.BitShift(self, other, direction=direction.upper())

        return translate

    def masked_select(self, mask):
        """Both broadcast to one shape, in a row."""
        row = op.Constant(value_ints=[-1])
        whole = op.Expand(self, op.Shape(mask))
        return op.Compress(op.Reshape(whole, row), op.Reshape(op.Expand(mask, op.Shape(whole)), row), axis=0)

    def bent(unit):
        """Half of the square up to `bend`, a line beyond: near * (apart - near / 2), where `near` is the distance up to
        `bend`. It is the slope too, and has no gradient itself.
        """
        def translate(self, target, reduction=1, bend=1.0):
            pair = promoted(op, self, target)
            like = self if pair[0] is self else target
            apart = op.Abs(op.Sub(*pair))
            near = own.StopGradient(op.Min(apart, number(op, bend, like)))
            losses = op.Mul(near, op.Sub(apart, op.Mul(near, number(op, 0.5, like))))
            if unit(bend) != 1:
                losses = op.Mul(losses, number(op, unit(bend), like))
            return losses if not reduction else (op.ReduceMean if reduction == 1 else op.ReduceSum)(losses, keepdims=0)

        return translate

    return {
        aten.smooth_l1_loss.default: bent(lambda bend: 1 / bend),
        aten.huber_loss.default: bent(lambda bend: 1),
        aten.pad.default: pad,
        aten.dropout.default: dropout, aten.native_dropout.default: native_dropout, aten.celu.default: celu,
        aten.sinc.default: sinc,
        aten.atan2.default: atan2,
        aten.cumprod.default: cumprod,
        **{getattr(getattr(aten, f"bitwise_{direction}_shift"), overload): shifted(direction)
           for direction in ("left", "right") for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")},
        **{overload: truth(extremum) for name, extremum in (("any", op.ReduceMax), ("all", op.ReduceMin))
           for packet in (getattr(aten, name),) for overload in (packet.default, packet.dim, packet.dims)},
        aten.__lshift__.Scalar: shifted("left"),
        aten.__rshift__.Scalar: shifted("right"),
        aten.isinf.default: infinite(),
        aten.isposinf.default: infinite(detect_negative=0),
        aten.isneginf.default: infinite(detect_positive=0),
        aten.masked_select.default: masked_select,
    }


def _numbers(op: Operators) -> Table:
    """Numbers that torch.onnx rounds to float32 before they meet a tensor of float64, where Python's are of 53 bits.

    Floats made of sizes are computed in float64 as Python does; what uses them casts them to its own dtype. See also
    wide_numbers().
    """

    def real(x):
        return x if isinstance(x, float) else op.Cast(x, to=onnx.TensorProto.DOUBLE)

    def root(x):
        """math.sqrt() of a size, as Dynamo has it."""
        return op.Sqrt(op.Cast(x, to=onnx.TensorProto.DOUBLE))

    def rounded(x, digits=None):
        """round() to a whole number: to the even one of two that are as near, as Python does."""
        if digits is not None:
            raise Untraceable("The module rounds a number that follows from sizes to decimal places.")
        return op.Cast(op.Round(op.Cast(x, to=onnx.TensorProto.DOUBLE)), to=onnx.TensorProto.INT64)

    def truediv(self, other):
        return op.Div(*(op.Cast(x, to=onnx.TensorProto.DOUBLE) for x in (self, other)))

    def floordiv(self, other):
        """Rounded down: -1 // 2 is -1, where Div of whole numbers gives 0. Mod has Python's sign."""
        return op.Div(op.Sub(self, op.Mod(self, other)), other)

    def raised(self, exponent):
        whole = all(isinstance(x, int) or not isinstance(x, float) and not x.dtype.is_floating_point()
                    for x in (self, exponent))
        to = onnx.TensorProto.INT64 if whole else onnx.TensorProto.DOUBLE
        return op.Pow(op.Cast(self, to=to), op.Cast(exponent, to=to))

    def leaky_relu(self, negative_slope=0.01):
        if isinstance(negative_slope, (int, float)):
            return op.LeakyRelu(self, alpha=float(negative_slope))
        zero = op.CastLike(op.Constant(value_float=0.0), self)
        return op.Where(op.Greater(self, zero), self, scaled(self, negative_slope))

    def scaled(x, number):
        """A product with a number, which may be made of sizes."""
        return x if number == 1 else op.Mul(x, op.CastLike(number, x))

    def softplus(self, beta=1.0, threshold=20.0):
        steep = scaled(self, beta)
        smooth = op.Softplus(steep) if beta == 1 else op.Div(op.Softplus(steep), op.CastLike(beta, self))
        return op.Where(op.Greater(steep, op.CastLike(threshold, self)), self, smooth)

    def addcmul(self, tensor1, tensor2, value=1.0):
        return op.Add(self, scaled(op.Mul(tensor1, tensor2), value))

    def addcdiv(self, tensor1, tensor2, value=1.0):
        return op.Add(self, scaled(op.Div(tensor1, tensor2), value))

    def power(self, exponent):
        if isinstance(exponent, (int, float)):
            from onnxscript.function_libs.torch_lib.ops import core

            return core.aten_pow_tensor_scalar(self, exponent)
        if not self.dtype.is_floating_point() and exponent.dtype.is_floating_point():
            self = op.Cast(self, to=DEFAULTS[torch.get_default_dtype()])
        return op.Pow(self, op.CastLike(exponent, self))

    def reverse_subtract(self, other, alpha=1):
        return op.Sub(op.CastLike(other, self), scaled(self, alpha))

    def power_of_tensors(self, exponent):
        """ONNX's result has the dtype of the base, whatever the exponent's is."""
        return op.Pow(*promoted(op, self, exponent))

    def scalar_tensor(s, dtype=int(onnx.TensorProto.FLOAT), layout="", device="", pin_memory=False):
        """A number in the dtype it is wanted in: by way of float32, 0.1 would be another one in float64."""
        if isinstance(s, (bool, int, float)):
            return constant(op, s, dtype)
        return op.Cast(s, to=dtype)

    def arange(name):
        """Steps of floats are counted and multiplied in float64, as torch does;
        in float32 there may be one more or less.
        """

        def translate(*bounds, dtype=-1, layout="", device="", pin_memory=False, end=None):
            from onnxscript.function_libs.torch_lib.ops import core

            bounds = bounds if end is None else (*bounds, end)
            wanted = None if dtype in (-1, None) else int(dtype)
            whole = all(isinstance(b, int) or (not isinstance(b, float) and not b.dtype.is_floating_point())
                        for b in bounds)
            if wanted in INTEGERS or (whole and wanted is None):
                return getattr(core, name)(*bounds, dtype=dtype)
            first, last, step = (0.0, bounds[0], 1.0) if len(bounds) == 1 else (*bounds, 1.0)[:3]
            numbers = op.Range(*(op.Cast(b, to=onnx.TensorProto.DOUBLE) for b in (first, last, step)))
            return op.Cast(numbers, to=wanted or DEFAULTS[torch.get_default_dtype()])

        return translate

    def full(size, fill_value, dtype=-1, **_):
        """A number that is made of sizes, or an argument, has float64 until now."""
        from onnxscript.function_libs.torch_lib.ops import core

        if dtype in (-1, None) and not isinstance(fill_value, (int, float)) and fill_value.dtype.is_floating_point():
            dtype = DEFAULTS[torch.get_default_dtype()]
        return core.aten_full(size, fill_value, -1 if dtype is None else dtype)

    return {
        aten.full.default: full,
        aten.arange.default: arange("aten_arange"),
        aten.arange.start: arange("aten_arange_start"),
        aten.arange.start_step: arange("aten_arange_start_step"),
        aten.rsub.Scalar: reverse_subtract,
        aten.square.default: lambda self: power(self, 2),
        aten.pow.Tensor_Scalar: power,
        aten.pow.Tensor_Tensor: power_of_tensors,
        torch.sym_float: real,
        torch.sym_sqrt: root,
        round: rounded,
        torch.sym_sum: lambda sizes: functools.reduce(op.Add, sizes),
        operator.truediv: truediv,
        operator.floordiv: floordiv,
        operator.pow: raised,
        aten.leaky_relu.default: leaky_relu,
        aten.softplus.default: softplus,
        aten.addcmul.default: addcmul,
        aten.addcdiv.default: addcdiv,
        aten.scalar_tensor.default: scalar_tensor,
    }


def _wider(op: Operators) -> Table:
    """Reductions with a dtype: torch casts what goes in. torch.onnx casts what comes out,
    in 16 bits rounded or infinite.
    """

    def cast(x, dtype):
        return x if dtype is None or dtype == -1 else op.Cast(x, to=int(dtype))

    def along_axis(kind):
        def translate(self, dim, dtype=-1):
            if len(self.shape):
                return kind(cast(self, dtype), axis=dim)
            axes = op.Constant(value_ints=[0])
            return op.Squeeze(kind(op.Unsqueeze(cast(self, dtype), axes), axis=0), axes)

        return translate

    def reduced(kind):
        def translate(self, dim=None, keepdim=False, dtype=-1):
            rank, x = 1 if self.shape is None else len(self.shape), cast(self, dtype)
            if not rank:
                return op.Identity(x)
            axes = [dim] if isinstance(dim, int) else list(dim or ())
            if not axes:
                return kind(x, keepdims=keepdim)
            return kind(x, op.Constant(value_ints=axes), keepdims=keepdim)

        return translate

    def power_norm(self, ord, dim, keepdim):
        """Flat in an entry that is zero, and where the norm is zero, whose powers have infinite slopes. In float32 at
        least: 1 / 3 in 16 bits is another root.
        """
        narrow = int(self.dtype) in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
        kind = onnx.TensorProto.FLOAT if narrow else int(self.dtype)
        one, zero, nothing, power, root = (constant(op, value, kind) for value in (
            1, 0, 0 if ord > 0 else math.inf, ord, 1 / ord))
        x = op.Abs(op.Cast(self, to=kind) if narrow else self)
        if ord < 1:
            at_zero = op.Equal(x, zero)
            powers = op.Where(at_zero, nothing, op.Pow(op.Where(at_zero, one, x), power))
        else:
            powers = op.Pow(x, power)
        sums = total(powers, dim, keepdim)
        empty = op.Equal(sums, nothing)
        norm = op.Where(empty, zero, op.Pow(op.Where(empty, one, sums), root))
        return op.CastLike(norm, self) if narrow else norm

    def vector_norm(self, ord=2.0, dim=None, keepdim=False, dtype=-1):
        from onnxscript.function_libs.torch_lib.ops import linalg

        if ord == 0:  # how many are not zero: flat
            wide = cast(self, dtype)  # NaN is not
            return total(op.Cast(op.Not(op.Equal(wide, number(op, 0, wide))), to=int(wide.dtype)), dim, keepdim)
        self = cast(self, dtype)
        if ord in (1, 2) or math.isinf(ord):
            norm = linalg.aten_linalg_vector_norm(self, ord, dim=dim, keepdim=keepdim)
        else:
            norm = power_norm(self, float(ord), dim, keepdim)
        # of all entries it gives one number in any case
        return op.Reshape(norm, op.Constant(value_ints=[1] * len(self.shape))) if keepdim and not dim else norm

    total = reduced(op.ReduceSum)
    return {
        aten.softmax.int: along_axis(op.Softmax),
        aten.log_softmax.int: along_axis(op.LogSoftmax),
        aten.mean.dim: reduced(op.ReduceMean),
        aten.linalg_vector_norm.default: vector_norm,
        aten.sum.dim_IntList: total,
        aten.sum.default: lambda self, dtype=-1: total(self, dtype=dtype),
    }


def _picked(op: Operators, own: Operators) -> Table:
    """max and min along a dimension: their gradient goes to the entry that is returned, not to all that are equal to
    it.

    torch.onnx writes ReduceMax and ReduceMin, whose gradient is shared among equals, as that of amax and amin.
    """

    def along(arg):
        def translate(self, dim, keepdim=False):
            if not len(self.shape):
                return op.Identity(self), op.Constant(value_int=0)
            boolean = int(self.dtype) == onnx.TensorProto.BOOL
            at = arg(op.Cast(self, to=onnx.TensorProto.UINT8) if boolean else self, axis=dim, keepdims=1)
            values = op.GatherElements(self, at, axis=dim)
            if keepdim:
                return values, at
            axes = op.Constant(value_ints=[dim])
            return op.Squeeze(values, axes), op.Squeeze(at, axes)

        return translate

    def topk(self, k, dim=-1, largest=True, sorted=True):
        """ONNX's takes the first ones of equals."""
        count = op.Constant(value_ints=[k]) if isinstance(k, int) else op.Reshape(k, op.Constant(value_ints=[1]))
        if len(self.shape):
            return own.TorchTopK(self, count, axis=dim, largest=int(largest), sorted=int(sorted))
        none = op.Constant(value_ints=[0])
        return tuple(op.Squeeze(x, none) for x in own.TorchTopK(op.Unsqueeze(self, none), count))

    def flattened(self, offset, dim1, dim2):
        """Planes of two axes as rows, the order of axes for that, and where the diagonal's elements are in a row."""
        rank = len(self.shape)
        ends = [dim1 % rank, dim2 % rank]
        order = [d for d in range(rank) if d not in ends] + ends
        x = self if order == sorted(order) else op.Transpose(self, perm=order)
        rows, columns = op.Shape(x, start=rank - 2, end=rank - 1), op.Shape(x, start=rank - 1)
        first, zero, one = (op.Constant(value_int=n) for n in (abs(offset), 0, 1))
        length = (op.Min(rows, op.Sub(columns, first)) if offset >= 0 else op.Min(op.Sub(rows, first), columns))
        steps = op.Mul(op.Range(zero, op.Squeeze(op.Max(length, zero)), one), op.Add(columns, one))
        at = op.Add(steps, first if offset >= 0 else op.Mul(columns, first))
        cells = op.Mul(rows, columns)
        row = op.Concat(op.Shape(x, end=rank - 2), cells, axis=0) if rank > 2 else cells
        return op.Reshape(x, row, allowzero=1), x, order, at

    def diagonal(self, offset=0, dim1=0, dim2=1):
        """torch.onnx sums over products with zeros, which beside infinity are not numbers."""
        if not isinstance(offset, int):
            from onnxscript.function_libs.torch_lib.ops import core

            return core.aten_diagonal(self, offset, dim1, dim2)
        flat, _, order, at = flattened(self, offset, dim1, dim2)
        return op.Gather(flat, at, axis=len(order) - 2)

    def diagonal_scatter(self, src, offset=0, dim1=0, dim2=1):
        if not isinstance(offset, int):
            raise Untraceable("The module writes a diagonal whose place depends on sizes.")
        flat, x, order, at = flattened(self, offset, dim1, dim2)
        source = src if src.dtype == self.dtype else op.CastLike(src, self)
        written = op.ScatterElements(flat, op.Expand(at, op.Shape(source)), source, axis=len(order) - 2)
        y = op.Reshape(written, op.Shape(x), allowzero=1)
        return y if order == sorted(order) else op.Transpose(y, perm=[order.index(d) for d in range(len(order))])

    def extreme(reduce):
        def translate(self, dim=(), keepdim=False):
            dims = [dim] if isinstance(dim, int) else list(dim)
            if not len(self.shape):
                return op.Identity(self)
            return reduce(self, *([op.Constant(value_ints=dims)] if dims else []), keepdims=int(keepdim))

        return translate

    return {aten.amax.default: extreme(op.ReduceMax), aten.amin.default: extreme(op.ReduceMin),
            aten.max.dim: along(op.ArgMax), aten.min.dim: along(op.ArgMin), aten.topk.default: topk,
            aten.diagonal.default: diagonal, aten.diagonal_copy.default: diagonal,
            aten.diagonal_scatter.default: diagonal_scatter}


def _resized(op: Operators) -> Table:
    """interpolate(align_corners=True) by factors: torch aligns the corners of the size that it gets, ONNX those of
    size * factor before it is rounded. So the size is what Resize is told."""

    def along(name, mode):
        overload = getattr(aten, name).vec

        def translate(self, output_size, align_corners, scale_factors=None):
            if scale_factors is None or not align_corners:
                from onnxscript.function_libs.torch_lib.ops import nn

                return getattr(nn, f"aten_{name}_vec")(self, output_size, align_corners, scale_factors)
            factors = onnx.helper.make_tensor("factors", onnx.TensorProto.DOUBLE, [len(scale_factors)], scale_factors)
            old = op.Cast(op.Shape(self, start=2), to=onnx.TensorProto.DOUBLE)
            new = op.Cast(op.Floor(op.Mul(old, op.Constant(value=factors))), to=onnx.TensorProto.INT64)
            sizes = op.Concat(op.Shape(self, start=0, end=2), new, axis=0)
            return op.Resize(self, None, None, sizes, mode=mode, coordinate_transformation_mode="align_corners",
                             cubic_coeff_a=-0.75)

        return overload, translate

    def with_scales(name):
        """A size and scales, of which torch takes the size for the result and the scales for its coordinates."""

        def translate(self, output_size, *more):
            from onnxscript.function_libs.torch_lib.ops import nn

            scales = more[-len(output_size):] if len(more) >= len(output_size) else ()
            if any(scale is not None and not (isinstance(old, int) and math.isclose(old * scale, new))
                   for old, new, scale in zip(self.shape[2:], output_size, scales)):
                raise Untraceable(f"The module calls {name} with a size and with scales that are not the quotients of "
                                  "sizes, which ONNX cannot express.")
            return getattr(nn, f"aten_{name}")(self, output_size, *more)

        return getattr(aten, name).default, translate

    return dict((along("upsample_bilinear2d", "linear"), along("upsample_bicubic2d", "cubic"),
                 along("upsample_trilinear3d", "linear"), *map(with_scales, (
                     "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
                     "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
                     "_upsample_bicubic2d_aa"))))


def _reshaped(op: Operators) -> Table:
    """Sizes of zero are meant: torchlib's reshape takes them as "the same as before",
    and its flatten leaves a size open.
    """

    def reshape(self, shape):
        from onnxscript.function_libs.torch_lib.ops import core

        return core.aten_view(self, shape)

    def flatten(self, start_dim=0, end_dim=-1):
        rank = len(self.shape)
        if rank == 0:
            return op.Reshape(self, op.Constant(value_ints=[1]))
        first, last = start_dim % rank, end_dim % rank
        parts = [op.ReduceProd(op.Shape(self, start=first, end=last + 1), keepdims=1)]
        if first > 0:
            parts.insert(0, op.Shape(self, start=0, end=first))
        if last + 1 < rank:
            parts.append(op.Shape(self, start=last + 1))
        return op.Reshape(self, op.Concat(*parts, axis=0) if len(parts) > 1 else parts[0], allowzero=1)

    def repeat_interleave(self, repeats, dim=None, output_size=None):
        """torch.onnx repeats the rows themselves where the number is made of sizes."""
        if dim is None:
            self, rank, axis = op.Reshape(self, op.Constant(value_ints=[-1])), 1, 0
        else:
            rank, axis = len(self.shape), dim % len(self.shape)
        one = op.Constant(value_ints=[1])
        count = op.Constant(value_ints=[repeats]) if isinstance(repeats, int) else op.Reshape(repeats, one)
        spread = op.Expand(op.Unsqueeze(self, op.Constant(value_ints=[axis + 1])),
                           op.Concat(*[one] * (axis + 1), count, *[one] * (rank - axis - 1), axis=0))
        sizes = [op.Shape(self, start=d, end=d + 1) for d in range(rank)]
        sizes[axis] = op.Mul(sizes[axis], count)
        return op.Reshape(spread, op.Concat(*sizes, axis=0) if rank > 1 else sizes[0], allowzero=1)

    return {aten.reshape.default: reshape, aten.flatten.using_ints: flatten,
            aten.repeat_interleave.self_int: repeat_interleave}


@contextlib.contextmanager
def wide_numbers() -> Iterator[None]:
    """Numbers are of float64, as Python's are, until they meet a tensor; torch.onnx has them in float32.

    A number that a translation casts to a tensor's dtype is written in float64; so are the types of what is made of
    sizes.
    """
    from onnxscript import ir

    mark = "onnxtrain number"

    def meeting(param, named_inputs, signature):
        """The dtype of a tensor that must have the same as the number given for this parameter."""
        for name, value in named_inputs.items():
            if (isinstance(value, ir.Value) and value.dtype is not None and mark not in value.meta
                    and signature.params_map[name].type_constraint is param.type_constraint):
                return value.dtype
        return None

    def process(constants):
        return lambda *given: processed(constants, *given)

    def processed(constants, signature, named_inputs, binding, farm, opset):
        number = named_inputs.get("input")
        if signature.name in ("Cast", "CastLike") and type(number) is float:
            named_inputs["input"] = ir.tensor(number, dtype=ir.DataType.DOUBLE)
        for name, value in list(named_inputs.items()):
            if isinstance(value, ir.Value) and mark in value.meta:
                dtype = meeting(signature.params_map[name], named_inputs, signature)
                if dtype not in (None, value.dtype):
                    named_inputs[name] = opset.Cast(value, to=int(dtype))
                    binding = _torch.resolve_parameter_dtypes(signature, named_inputs)
        return constants(signature, named_inputs, binding, farm, opset)

    def with_types(types):
        def set_type(value, meta, *args, **kwargs):
            types(value, meta, *args, **kwargs)
            if isinstance(meta, (float, torch.SymFloat)):
                value.dtype = ir.DataType.DOUBLE
                value.meta[mark] = True

        return set_type

    with wrapped("process_python_constants", process), wrapped("set_shape_type", with_types):
        yield
