"""What torch.onnx gets wrong for training, put right while the user's forward is traced.

export.py enters patched() around an export and Rewrite() around the user's forward. Rewrite replaces single torch
functions by ones that both exporters translate faithfully; the two operators that torch cannot express (a barrier for
gradients, a batch normalisation that hands out its batch statistics) are ops of the torch library `onnxtrain`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from onnxtrain._export import functions
from onnxtrain._export.exclusive import here, only_here
from onnxtrain._export.state import replaced

DOMAIN = "ai.onnxtrain"
DOMAIN_VERSION = 1


class Untraceable(Exception):
    """Something was reached that a trace would lose without a word; the message is a sentence."""


class CustomFunctionError(Untraceable):
    """A torch.autograd.Function was reached; tracing through it would lose its backward."""


@dataclasses.dataclass
class CustomFunctions:
    """What becomes of the user's torch.autograd.Functions.

    enabled: they are PythonOp nodes, but for those in `skipped` (full names); the rest are traced through, and named in
    `inlined`: autograd then differentiates their forward. nodes: whether the exporter can write such nodes.
    """

    enabled: bool = True
    skipped: tuple[str, ...] = ()
    nodes: bool = True
    inlined: list[str] = dataclasses.field(default_factory=list)


# --- operators of our own, in torch and in ONNX -----------------------------------------------------------------------

_library = torch.library.Library("onnxtrain", "DEF")
_library.define("batch_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)")
_library.define("stop_gradient(Tensor x) -> Tensor")


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    axes = [axis for axis in range(x.dim()) if axis != 1]
    y = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]
    return y, x.mean(axes), x.var(axes, unbiased=False)


def _batch_norm_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.new_empty(x.shape[1])
    return torch.empty_like(x), channels, torch.empty_like(channels)


_library.impl("batch_norm", _batch_norm, "CompositeExplicitAutograd")
_library.impl("stop_gradient", lambda x: x.detach().clone(), "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::batch_norm", _batch_norm_fake, lib=_library)
torch.library.register_fake("onnxtrain::stop_gradient", torch.empty_like, lib=_library)


def _register_schemas() -> None:
    """onnxscript emits, and onnx.checker accepts, only operators that have a schema."""
    if onnx.defs.has("HardTanh", DOMAIN):
        return
    schema = onnx.defs.OpSchema
    types = sorted(onnx.defs.get_schema("Identity", 14).type_constraints[0].allowed_type_strs)
    onnx.defs.register_schema(
        schema(
            "StopGradient", DOMAIN, DOMAIN_VERSION, doc="Identity whose gradient is zero.",
            inputs=[schema.FormalParameter("x", "T")], outputs=[schema.FormalParameter("y", "T")],
            type_constraints=[("T", types, "any tensor")],
        )
    )
    onnx.defs.register_schema(
        schema(
            "HardTanh", DOMAIN, DOMAIN_VERSION, doc="Clip whose gradient at the bounds is zero.",
            inputs=[schema.FormalParameter(name, "T") for name in ("x", "min", "max")],
            outputs=[schema.FormalParameter("y", "T")], type_constraints=[("T", types, "any tensor")],
        )
    )


_register_schemas()


def translations(opset: int) -> dict[Any, Callable[..., Any]]:
    """The custom_translation_table of the default exporter."""
    import onnxscript

    op = getattr(onnxscript, f"opset{opset}")
    own = onnxscript.values.Opset(DOMAIN, DOMAIN_VERSION)

    def stop_gradient(x):
        return own.StopGradient(x)

    def batch_norm(x, weight=None, bias=None, eps=1e-5):
        # momentum 0 makes the second and third output the batch statistics, whatever the running ones are
        channels = op.Shape(x, start=1, end=2)
        one, zero = (op.Expand(op.CastLike(op.Constant(value_float=v), x), channels) for v in (1.0, 0.0))
        return op.BatchNormalization(
            x, one if weight is None else weight, zero if bias is None else bias, zero, one,
            epsilon=eps, momentum=0.0, training_mode=1,
        )

    def pieces(x, sizes, axis):
        """ONNX's Split rather than a sequence, which is no tensor; slices where the sizes differ."""
        even = -(-sum(sizes) // len(sizes))
        if len(sizes) == 1:
            return (op.Identity(x),)
        if all(size == even for size in sizes[:-1]):
            return tuple(op.Split(x, axis=axis, num_outputs=len(sizes)))
        ends = list(itertools.accumulate(sizes))
        axes = op.Constant(value_ints=[axis])
        return tuple(
            op.Slice(x, op.Constant(value_ints=[end - size]), op.Constant(value_ints=[end]), axes)
            for size, end in zip(sizes, ends)
        )

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

    def number(value, like):
        return op.Constant(value=onnx.helper.make_tensor("value", int(like.dtype), [], [value]))

    # Slopes where pieces meet, as eager has them: a hard tanh is flat at its bounds, a clamp is not.

    def hardtanh(self, min_val=-1.0, max_val=1.0):
        return own.HardTanh(self, number(min_val, self), number(max_val, self))

    def relu6(self):
        return hardtanh(self, 0.0, 6.0)

    def clamp(self, min=None, max=None):
        bounds = [None if bound is None else number(bound, self) for bound in (min, max)]
        return op.Clip(self, *bounds)

    def clamp_min(self, min):
        return clamp(self, min=min)

    def clamp_max(self, max):
        return clamp(self, max=max)

    def clamp_tensor(self, min=None, max=None):
        if min is not None:
            self = op.Where(op.Less(self, min), min, self)
        return self if max is None else op.Where(op.Greater(self, max), max, self)

    def celu(self, alpha=1.0):
        """ONNX has it for float32 alone."""
        if alpha == 1.0:
            return op.Elu(self)
        scale = number(alpha, self)
        return op.Mul(scale, op.Elu(op.Div(self, scale)))

    def sinc(self):
        """torch.onnx divides by zero where it then takes another value, and the slope there is not a number."""
        one, none = number(1, self), op.Equal(self, number(0, self))
        angle = op.Mul(op.Where(none, one, self), number(math.pi, self))
        return op.Where(none, one, op.Div(op.Sin(angle), angle))

    def atan2(self, other):
        """By the quotient that is at most one, so that neither it nor its slope is infinite."""
        zero, one, quarter = (number(v, self) for v in (0, 1, math.pi / 2))
        flat = op.LessOrEqual(op.Abs(self), op.Abs(other))
        below = op.Where(op.And(flat, op.Not(op.Equal(other, zero))), other, one)
        turned = op.Where(op.Less(other, zero), number(math.pi, self), zero)
        angle = op.Add(op.Atan(op.Div(op.Where(flat, self, zero), below)), op.Where(op.Less(self, zero), op.Neg(turned), turned))
        steep = op.Where(flat, one, self)
        up = op.Where(op.Less(self, zero), op.Neg(quarter), quarter)
        return op.Where(flat, angle, op.Sub(up, op.Atan(op.Div(op.Where(flat, zero, other), steep))))

    def scalar_tensor(s, dtype=int(onnx.TensorProto.FLOAT), layout="", device="", pin_memory=False):
        """A number in the dtype it is wanted in: by way of float32, 0.1 would be another one in float64."""
        if isinstance(s, (bool, int, float)):
            return op.Constant(value=onnx.helper.make_tensor("value", dtype, [], [s]))
        return op.Cast(s, to=dtype)

    aten = torch.ops.aten
    return {
        aten.scalar_tensor.default: scalar_tensor,
        aten.hardtanh.default: hardtanh,
        aten.clamp.default: clamp,
        aten.clamp_min.default: clamp_min,
        aten.clamp_max.default: clamp_max,
        aten.clamp.Tensor: clamp_tensor,
        aten.celu.default: celu,
        aten.relu6.default: relu6,
        aten.sinc.default: sinc,
        aten.atan2.default: atan2,
        aten.detach.default: stop_gradient,
        aten.split.Tensor: split,
        aten.split_with_sizes.default: split_with_sizes,
        aten.unbind.int: unbind,
        torch.ops.onnxtrain.stop_gradient.default: stop_gradient,
        torch.ops.onnxtrain.batch_norm.default: batch_norm,
        torch.ops.onnxtrain.python_op.default: functions.translation(),
    }


def register_symbolics(opset: int) -> None:
    """The same for the TorchScript exporter, which keeps one table for the process."""
    from torch.onnx import register_custom_op_symbolic, symbolic_helper

    def stop_gradient(g, x):
        return g.op(f"{DOMAIN}::StopGradient", x).setType(x.type())

    @symbolic_helper.parse_args("v", "v", "v", "f")
    def batch_norm(g, x, weight, bias, eps):
        channels = g.op("Shape", x, start_i=1, end_i=2)
        one, zero = (
            g.op("CastLike", g.op("ConstantOfShape", channels, value_t=torch.tensor([v])), x) for v in (1.0, 0.0)
        )
        weight = one if weight.node().mustBeNone() else weight
        bias = zero if bias.node().mustBeNone() else bias
        return g.op(
            "BatchNormalization", x, weight, bias, zero, one, epsilon_f=eps, momentum_f=0.0,
            training_mode_i=1, outputs=3,
        )

    register_custom_op_symbolic("onnxtrain::stop_gradient", stop_gradient, opset)
    register_custom_op_symbolic("onnxtrain::batch_norm", batch_norm, opset)


# --- single functions -------------------------------------------------------------------------------------------------


# torch's own functions, since patched() puts ours in their place
_F = types.SimpleNamespace(
    batch_norm=F.batch_norm, instance_norm=F.instance_norm, cross_entropy=F.cross_entropy, nll_loss=F.nll_loss,
    embedding=F.embedding, logsigmoid=F.logsigmoid,
    binary_cross_entropy_with_logits=F.binary_cross_entropy_with_logits,
    scaled_dot_product_attention=F.scaled_dot_product_attention,
)


class CumulativeMomentum:
    """Stands for momentum=None during an export: F.batch_norm is handed it, and reads the count as a tensor.

    Without it _BatchNorm.forward calls float() on num_batches_tracked, which no exporter can trace.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def factor(self, like: Tensor) -> Tensor:
        return self.module.num_batches_tracked.to(like.dtype).reciprocal()


def _unbiased(var: Tensor, count: int) -> Tensor:
    """torch normalises with the biased variance and stores the unbiased one."""
    return var * count / (count - 1)  # by whole numbers: the exporter keeps a symbolic quotient in float32


def _update(running: Tensor, batch: Tensor, momentum: float | Tensor) -> None:
    running.mul_(1 - momentum).add_(batch.to(running.dtype) * momentum)


def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: Any = 0.1, eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm with the running statistics updated in the open."""
    if isinstance(momentum, CumulativeMomentum):
        momentum = momentum.factor(running_mean) if training and running_mean is not None else 0.0
    if not training:
        return _F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    F._verify_batch_size(input.size())
    y, mean, var = torch.ops.onnxtrain.batch_norm(input, weight, bias, eps)
    if running_mean is not None:
        _update(running_mean, mean, momentum)
    if running_var is not None:
        _update(running_var, _unbiased(var, input.numel() // input.size(1)), momentum)
    return y


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.instance_norm with the running statistics, the mean over the batch of each instance's, updated in the open."""
    if not use_input_stats:
        return _F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    F._verify_spatial_size(input.size())
    axes = list(range(2, input.dim()))
    if running_mean is not None and running_var is not None:
        _update(running_mean, input.mean(axes).mean(0), momentum)
        _update(running_var, input.var(axes, unbiased=True).mean(0), momentum)
    return _F.instance_norm(input, None, None, weight, bias, True, 0.0, eps)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    """Attention in plain operators. Rows that a mask hides entirely give zero, as torch's own do."""
    if enable_gqa:
        key, value = (_repeat_heads(x, query.size(-3) // x.size(-3)) for x in (key, value))
    if scale is None:
        scale = 1.0 / math.sqrt(int(query.size(-1)))
    # query: (..., L, E)  key: (..., S, E)  value: (..., S, Ev)  scores: (..., L, S)
    scores = torch.matmul(query * scale, key.transpose(-2, -1))
    empty = None
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("scaled_dot_product_attention: explicit attn_mask should not be set when is_causal=True")
        causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        attn_mask = torch.zeros_like(causal, dtype=scores.dtype).masked_fill(causal.logical_not(), -math.inf)
    elif attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
        # On the mask alone, which is small or constant: a hidden row is shown, and its result thrown away.
        empty = attn_mask.amax(-1, keepdim=True) == -math.inf
        attn_mask = attn_mask.masked_fill(empty, 0.0)
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p, True)
    output = torch.matmul(weights, value)
    return output if empty is None else output.masked_fill(empty, 0.0)


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """(..., H, S, E) to (..., H * times, S, E), each head repeated in place."""
    return x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:]).flatten(-4, -3)


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:
    """F.cross_entropy; ONNX's operator knows neither label smoothing nor class probabilities nor a single sample."""
    if size_average is not None or reduce is not None:
        reduction = F._Reduction.legacy_get_string(size_average, reduce)
    if input.dim() == 1:
        loss = cross_entropy(
            input.unsqueeze(0), target.unsqueeze(0), weight, None, ignore_index, None, reduction, label_smoothing
        )
        return loss.squeeze(0) if reduction == "none" else loss
    if target.is_floating_point():
        return _soft_cross_entropy(input, target, weight, reduction, label_smoothing)
    if label_smoothing > 0.0:
        return _smooth_cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)
    return _F.cross_entropy(input, _labels(target), weight, ignore_index=ignore_index, reduction=reduction)


def _labels(target: Tensor) -> Tensor:
    return target if target.dtype == torch.int64 else target.long()


def _along_classes(weight: Tensor, dims: int) -> Tensor:
    return weight.view(1, -1, *([1] * (dims - 2)))


def _soft_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float
) -> Tensor:
    """Class probabilities as targets."""
    classes = input.size(1)
    if label_smoothing > 0.0:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    losses = torch.log_softmax(input, 1) * target  # (N, C, ...)
    if weight is not None:
        losses = losses * _along_classes(weight, input.dim())
    if reduction == "none":
        return -losses.sum(1)
    total = -losses.sum()
    return total if reduction == "sum" else total / (input.numel() // classes)


def _smooth_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    """(1 - s) times the negative log likelihood of the label, plus s times the mean over all classes."""
    classes = input.size(1)
    log_prob = torch.log_softmax(input, 1)  # (N, C, ...)
    kept = target != ignore_index  # (N, ...)
    label = _labels(target.masked_fill(kept.logical_not(), 0))
    picked = -log_prob.gather(1, label.unsqueeze(1)).squeeze(1)  # (N, ...)
    if weight is None:
        scale = kept.to(input.dtype)
        spread = -log_prob.sum(1)
    else:
        # gather on the flat labels, since the weight is one vector for all positions
        scale = weight.gather(0, label.reshape(-1)).reshape(label.shape) * kept.to(weight.dtype)
        picked = picked * scale
        spread = -(log_prob * _along_classes(weight, input.dim())).sum(1)
    losses = (1 - label_smoothing) * picked + (label_smoothing / classes) * spread
    losses = losses.masked_fill(kept.logical_not(), 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / scale.sum()


def nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:
    """F.nll_loss; positions are folded into the batch, since the exporters know two dimensions only."""
    if size_average is not None or reduce is not None:
        reduction = F._Reduction.legacy_get_string(size_average, reduce)
    if input.dim() > 2:
        flat = input.movedim(1, -1).flatten(0, -2)
        loss = _F.nll_loss(flat, _labels(target.reshape(-1)), weight, ignore_index=ignore_index, reduction=reduction)
        return loss.reshape(target.shape) if reduction == "none" else loss
    return _F.nll_loss(input, _labels(target), weight, ignore_index=ignore_index, reduction=reduction)


def logsigmoid(input: Tensor) -> Tensor:
    """F.logsigmoid; the exporters write Log(Sigmoid(x)), minus infinity from x = -104 on."""
    return -F.softplus(-input)


def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    reduce: bool | None = None, reduction: str = "mean", pos_weight: Tensor | None = None,
) -> Tensor:
    """F.binary_cross_entropy_with_logits, which the exporters write with logarithms of a sigmoid that may be 0."""
    if size_average is not None or reduce is not None:
        reduction = F._Reduction.legacy_get_string(size_average, reduce)
    log_likelihood = logsigmoid(input)
    if pos_weight is not None:
        log_likelihood = log_likelihood * (1 + (pos_weight - 1) * target)
    losses = (1 - target) * input - log_likelihood
    if weight is not None:
        losses = losses * weight
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:
    """F.embedding; ONNX's Gather would give the row of padding_idx a gradient. A sparse gradient comes out dense."""
    if max_norm is not None or scale_grad_by_freq:
        raise Untraceable("The module uses an embedding with max_norm or scale_grad_by_freq, which ONNX cannot say.")
    rows = _F.embedding(input, weight)
    if padding_idx is None:  # a frozen weight may be thawed later, with this graph
        return rows
    padding = (input == padding_idx % weight.size(0)).unsqueeze(-1)
    return torch.where(padding, rows.detach(), rows)


def _torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*_args, **_kwargs):
        raise Untraceable(f"The module calls {what} inside forward; a graph would lose it.")

    return refuse


_PATCHES: dict[str, Callable[..., Any]] = {
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
    "embedding": embedding,
    "logsigmoid": logsigmoid,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
}
_REWRITES: dict[Any, Callable[..., Any]] = {
    **{getattr(_F, name): function for name, function in _PATCHES.items()},
    torch.batch_norm: _torch_batch_norm,
    torch.Tensor.data.__get__: lambda x: x.detach(),  # .data is invisible to a trace
    torch.Tensor.register_hook: _refuse("Tensor.register_hook()"),
    torch.Tensor.retain_grad: _refuse("Tensor.retain_grad()"),
    torch.Tensor.grad.__get__: _refuse("the getter of Tensor.grad"),
    torch.Tensor.backward: _refuse("Tensor.backward()"),
    torch.autograd.grad: _refuse("torch.autograd.grad()"),
}


class Rewrite(TorchFunctionMode):
    """Entered around the user's forward, so that it sees each call before the exporter does.

    It catches names that users imported from torch.nn.functional; what torch's own Python calls from there (multi-head
    attention, say) it does not see, since a mode is off while one of its calls runs: patched() replaces those.

    Args:
        barriers: make every result that forward computes without grad mode a gradient barrier. The default exporter
            marks such regions in its graph; the TorchScript exporter has no trace of them, nor of detach().
        flags: which tensors require a gradient.
    """

    def __init__(self, barriers: bool, flags: Flags) -> None:
        super().__init__()
        self._barriers = barriers
        self._flags = flags
        self._values = _FrozenValues() if barriers else None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        rewrite = self._flags.HANDLERS.get(func)
        if rewrite is not None:
            return rewrite(self._flags, *args, **(kwargs or {}))
        if self._flags.frozen:
            args, kwargs = self._flags.stopped((args, kwargs), torch.ops.onnxtrain.stop_gradient if self._barriers else torch.detach)
        rewrite = _REWRITES.get(func)
        if self._values is not None:
            self._values.before(func, args)
        result = (rewrite or func)(*args, **(kwargs or {}))
        if self._values is not None:
            self._values.after(func, args, kwargs, result)
        if self._barriers and (func in _DETACHING or not torch.is_grad_enabled()):
            return tree_map_only(Tensor, lambda x: _barrier(x, args), result)
        return result


class Flags:
    """Tensor.requires_grad while forward is traced: who asks for it, and who changes it.

    A graph is true for the flags that it was traced with where forward asks for one. A parameter that forward freezes is a
    constant from there on; where it is still frozen at the end, each step has to freeze it again (`changed`).

    Args:
        parameters: of the module as it is traced, by name.
    """

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._names = WeakIdKeyDictionary()
        for name, parameter in parameters.items():
            self._names[parameter] = name
        self._now = WeakIdKeyDictionary()
        self.consulted = False
        self.frozen = False

    def get(self, tensor: Tensor) -> bool:
        self.consulted = True
        return self._now.get(tensor, tensor.requires_grad)

    def change(self, tensor: Tensor, requires_grad: bool = True) -> Tensor:
        before, requires_grad = self.get(tensor), bool(requires_grad)
        if before == requires_grad:
            return tensor
        if tensor not in self._names or requires_grad and not tensor.requires_grad:
            raise Untraceable(f"The module calls Tensor.requires_grad_({requires_grad}) inside forward on what is no parameter "
                              "of its own, or was frozen before; a graph would lose it.")
        self._now[tensor] = requires_grad
        self.frozen = True
        return tensor

    def ask(self, tensor: Tensor, getter: Any) -> Any:
        self.consulted = True
        return getter(tensor)

    def stopped(self, values: Any, barrier: Callable[[Tensor], Tensor]) -> Any:
        """Parameters that are frozen now, behind a barrier."""
        return tree_map_only(Tensor, lambda x: barrier(x) if self._now.get(x, True) is False else x, values)

    @property
    def changed(self) -> tuple[tuple[str, bool], ...]:
        """Parameters whose flag is another than before."""
        return tuple(sorted((self._names[t], flag) for t, flag in self._now.items() if flag != t.requires_grad))

    HANDLERS = {
        Tensor.requires_grad.__get__: get, Tensor.requires_grad.__set__: change, Tensor.requires_grad_: change,
        Tensor.is_leaf.__get__: lambda self, tensor: self.ask(tensor, Tensor.is_leaf.__get__),
        Tensor.grad_fn.__get__: lambda self, tensor: self.ask(tensor, Tensor.grad_fn.__get__),
    }


class _FrozenValues:
    """Stops a TorchScript trace where Python reads the contents of a tensor, which would be frozen into the graph.

    Sizes are tensors in such a trace; those, and what forward makes of them and of constants alone, may be read.
    """

    _READERS = frozenset(
        getattr(Tensor, name) for name in
        ("__bool__", "__int__", "__float__", "__complex__", "__index__", "item", "tolist", "numpy", "__array__",
         "__contains__") if hasattr(Tensor, name)
    )
    _SIZES = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndim.__get__, Tensor.__len__,
                        torch.numel))
    _RANDOM = ("rand", "bernoulli", "normal", "uniform", "multinomial", "exponential", "geometric", "poisson", "cauchy",
               "dropout")

    def __init__(self) -> None:
        self._free = WeakIdKeyDictionary()

    def before(self, func: Any, args: tuple[Any, ...]) -> None:
        if func in self._READERS and isinstance(args[0], Tensor) and args[0] not in self._free:
            raise Untraceable("Python code branches on, or reads, the value of a tensor; TorchScript would freeze it.")

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "")
        free = func in self._SIZES or not any(word in name for word in self._RANDOM) and all(t in self._free for t in given)
        changed = given[:1] if name.endswith("_") or name == "__setitem__" else []
        for tensor in (*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), *changed):
            if free:
                self._free[tensor] = True
            else:
                self._free.pop(tensor, None)


_DETACHING = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}


def _barrier(result: Tensor, args: tuple[Any, ...]) -> Tensor:
    """In-place operations and properties give back an argument or the property; those stay themselves."""
    if not result.is_floating_point() or any(result is argument for argument in args):
        return result
    return torch.ops.onnxtrain.stop_gradient(result)


# --- what has to hold for the whole export ----------------------------------------------------------------------------


@contextlib.contextmanager
def noting_modes(flags: Flags, module: torch.nn.Module) -> Iterator[None]:
    """Sees the user's code ask whether gradients are on, also by a name that it imported; what torch's own asks is of no
    concern."""
    functions = [value for kind in {kind for child in module.modules() for kind in type(child).__mro__}
                 if kind.__module__.split(".")[0] != "torch" for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    known = list({id(function.__globals__): function.__globals__ for function in functions}.values())

    def noted(original: Callable[[], bool]) -> Callable[[], bool]:
        def ask() -> bool:
            asking = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
            if asking not in ("torch", "onnxtrain") and here():
                flags.consulted = True
            return original()

        return ask

    with contextlib.ExitStack() as stack:
        for name in ("is_grad_enabled", "is_inference_mode_enabled"):
            original = getattr(torch, name)
            ours = noted(original)
            stack.enter_context(replaced(torch, name, ours))
            for names in known:
                for imported in [key for key, value in names.items() if value is original]:
                    names[imported] = ours
                    stack.callback(names.__setitem__, imported, original)
        yield


@contextlib.contextmanager
def patched(module: torch.nn.Module, notes: list[str], custom: CustomFunctions) -> Iterator[None]:
    """Patches of torch for the length of an export; enter it inside unchanged()."""
    transformer = torch.nn.modules.transformer
    detect = transformer._detect_is_causal_mask
    for child in module.modules():
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm) and child.momentum is None:
            child.momentum = CumulativeMomentum(child)

    def hinted(mask, is_causal=None, size=None):
        # It would compare a mask's values. Without a hint the mask is applied as it stands, which is never wrong.
        return False if is_causal is None else detect(mask, is_causal, size)

    generator = "_checkpoint_without_reentrant_generator"
    checkpoint = getattr(torch.utils.checkpoint, generator)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        for name, function in _PATCHES.items():
            stack.enter_context(replaced(F, name, only_here(function, getattr(F, name))))
        stack.enter_context(replaced(transformer, "_detect_is_causal_mask", only_here(hinted, detect)))
        stack.enter_context(_applied_by(_applier(notes, custom)))
        stack.enter_context(
            replaced(torch.utils.checkpoint, generator, only_here(_inlined_checkpoint(notes), checkpoint))
        )
        stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
        torch.backends.mha.set_fastpath_enabled(False)  # its fused operators have no translation and no gradient
        yield


_STATIC = inspect.getattr_static(torch.autograd.Function, "apply")  # of C where torch has it there
_APPLY = getattr(_STATIC, "__func__", None)


def _original_apply() -> Callable[..., Any]:
    """What Function.apply does when nobody exports; calls with the class first."""
    if not isinstance(_APPLY, types.FunctionType):
        return lambda cls, *args, **kwargs: _STATIC.__get__(None, cls)(*args, **kwargs)
    return types.FunctionType(_APPLY.__code__, _APPLY.__globals__, _APPLY.__name__, _APPLY.__defaults__, _APPLY.__closure__)


_ORIGINAL_APPLY = _original_apply()
_dispatch: Callable[..., Any] = _ORIGINAL_APPLY


class _Trampoline:
    def apply(cls, *args, **kwargs):  # noqa: B902, N805  its code stands in for that of torch.autograd.Function.apply
        __class__  # noqa: B018  the same free variable as torch's
        from onnxtrain._export import rewrite

        return rewrite._dispatch(cls, *args, **kwargs)


@contextlib.contextmanager
def _applied_by(dispatch: Callable[..., Any]) -> Iterator[None]:
    """Every use of Function.apply ends in `dispatch`, also of a method that was bound before: `self.f = MyFunction.apply`.

    So it is the code of torch's function that is exchanged, not the attribute; where it has none, the attribute.
    """
    global _dispatch
    if not isinstance(_APPLY, types.FunctionType):
        with replaced(torch.autograd.Function, "apply", classmethod(dispatch)):
            yield
        return
    code, before = _APPLY.__code__, _dispatch
    if code.co_freevars != _Trampoline.apply.__code__.co_freevars and before is _ORIGINAL_APPLY:
        raise Untraceable("torch.autograd.Function.apply is not what this release of onnxtrain knows.")
    _dispatch = dispatch
    _APPLY.__code__ = _Trampoline.apply.__code__
    try:
        yield
    finally:
        _APPLY.__code__, _dispatch = code, before


def _applier(notes: list[str], custom: CustomFunctions) -> Callable[..., Any]:
    """torch.autograd.Function.apply during an export."""
    original = _ORIGINAL_APPLY

    def apply(cls, *args, **kwargs):
        if not here() or functions.inside():
            return original(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run, _preserve_rng_state, *rest = args
            _note_checkpoint(notes)
            return run(*rest)
        if cls.__module__.split(".")[0] == "torch":
            return original(cls, *args, **kwargs)
        name = functions.name_of(cls)
        if not custom.enabled or name in custom.skipped:
            custom.inlined.append(name)
            return original(cls, *args, **kwargs)
        if custom.nodes:
            try:
                return functions.record(cls, args)
            except functions.Unrunnable as error:
                raise CustomFunctionError(str(error)) from error
        raise CustomFunctionError(f"The module calls torch.autograd.Function {name}; a graph would lose its backward.")

    return apply


def _note_checkpoint(notes: list[str]) -> None:
    note = "torch.utils.checkpoint was inlined: results are the same, activations are kept, not recomputed."
    if note not in notes:
        notes.append(note)


def _inlined_checkpoint(notes: list[str]) -> Callable[..., Iterator[None]]:
    """checkpoint() advances this generator before and after the call that it makes."""

    def generator(*_args, **_kwargs):
        _note_checkpoint(notes)
        yield

    return generator


_registries: dict[Any, Any] = {}


@contextlib.contextmanager
def registry_reused() -> Iterator[None]:
    """torch.onnx parses the source of 500 functions for every export, most of the time of a small one."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        original = ONNXRegistry.from_torchlib.__func__
    except (ImportError, AttributeError):  # another torch: slower, not wrong
        yield
        return

    def from_torchlib(cls, *args, **kwargs):
        key = (args, tuple(sorted(kwargs.items())))
        if key not in _registries:
            _registries[key] = original(cls, *args, **kwargs)
        registry = copy.copy(_registries[key])
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    with replaced(ONNXRegistry, "from_torchlib", classmethod(from_torchlib)):
        yield
