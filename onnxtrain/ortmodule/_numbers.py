"""Functions of torch to which Dynamo gives a number that changes from call to call, in operators that take it as a
tensor.

Most operators of torch want such numbers, a slope, a probability or a shift, as constants: each value would be a
capture and an export of its own. Where, and only where, a number is symbolic, Dynamo captures the functions below
instead. They compute what torch's do. Under autocast most of torch's own stay, whose types autocast decides. Used by
_captured.py while it captures.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export.state import wrapped
from onnxtrain._torch import is_tracing, nn_functions, python_assert
from onnxtrain.ortmodule import _python_in_forward
from onnxtrain.ortmodule._utils import leave_alone

_HALVES = (torch.float16, torch.bfloat16)
_Axes: TypeAlias = int | tuple[int, ...] | None


def _require(holds: object, what: str) -> None:
    """Where torch raises, so does the capture: Python then runs forward, and torch says what is wrong."""
    if not holds:
        raise RuntimeError(f"{what} is out of its range")


def _wide(input: Tensor) -> Tensor:
    """As torch's kernels compute: in float32 at least, rounded once."""
    return input.float() if input.dtype in _HALVES else input


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


def _elu(input: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    x = _wide(input)
    negative = torch.expm1(torch.where(x <= 0, x, 0.0) * input_scale) * alpha
    return (torch.where(x <= 0, negative, x) * scale).to(input.dtype)


def _celu(input: Tensor, alpha: float = 1.0) -> Tensor:
    x = _wide(input)
    return torch.where(x <= 0, torch.expm1(torch.where(x <= 0, x, 0.0) / alpha) * alpha, x).to(input.dtype)


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """Flat at its bounds, where a clamp is not, before torch 2.14."""
    return torch.where(input <= min_val, min_val, torch.where(input >= max_val, max_val, input)).to(input.dtype)


def _softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where(input.abs() <= lambd, input * 0.0, input - input.sign() * lambd)


def _logit(input: Tensor, eps: float) -> Tensor:
    return torch.logit(torch.where(input < eps, eps, torch.where(input > 1.0 - eps, 1.0 - eps, input)))


def _nan_to_num(input: Tensor, nan: float | None = None, posinf: float | None = None,
                neginf: float | None = None) -> Tensor:
    limits = torch.finfo(input.dtype)
    high, low = limits.max if posinf is None else posinf, limits.min if neginf is None else neginf
    finite = torch.where(input == math.inf, high, torch.where(input == -math.inf, low, input))
    return torch.where(input.isnan(), 0.0 if nan is None else nan, finite).to(input.dtype)


def _round(input: Tensor, *, decimals: float = 0) -> Tensor:
    power = torch.full((), 10.0, dtype=torch.float64, device=input.device)
    if decimals < 0:
        power = power.pow(-decimals).to(input.dtype)
        return torch.round(input / power) * power
    power = power.pow(decimals).to(input.dtype)
    return torch.round(input * power) / power


def _roll(input: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    shifts = shifts if isinstance(shifts, (tuple, list)) else (shifts,)
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    if not dims:
        return _roll(input.flatten(), shifts, (0,)).view(input.shape)
    _require(len(shifts) == len(dims), "shifts")
    for shift, dim in zip(shifts, dims):
        size = input.size(dim)
        if size > 1:
            input = input.index_select(dim, (torch.arange(size, device=input.device) - shift) % size)
    return input


def _vector_norm(x: Tensor, ord: float = 2, dim: _Axes = None, keepdim: bool = False, *,
                 dtype: torch.dtype | None = None) -> Tensor:
    """Flat in an entry that is zero, and where the norm is zero."""
    if ord == 0.0:
        return torch.linalg.vector_norm(x, 0.0, dim, keepdim, dtype=dtype)
    given = x if dtype is None else x.to(dtype)
    wide = _wide(given).abs()
    axes = list(range(x.dim())) if dim is None else dim
    at_zero = wide == 0
    powers = torch.where(at_zero, torch.zeros_like(wide).pow(ord), torch.where(at_zero, 1.0, wide).pow(ord))
    sums = powers.sum(axes, keepdim)
    empty = (sums == 0) | (sums == math.inf)
    roots = torch.where(empty, 1.0, sums).pow(1.0 / ord)
    return torch.where(empty, sums.detach().pow(1.0 / ord), roots).to(given.dtype)


def _norm(input: Tensor, p: Any = "fro", dim: _Axes = None, keepdim: bool = False,
          dtype: torch.dtype | None = None) -> Tensor:
    return _vector_norm(input, p, dim, keepdim, dtype=dtype)


def _dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return _vector_norm(input - other, p)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.mm(mat1, mat2) * alpha
    return product if beta == 0 else input * beta + product  # of an input that does not count, NaN does not either


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, *, scale: float, enable_gqa: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query * scale, key, value, attn_mask, dropout_p, is_causal, scale=1.0,
                                          enable_gqa=enable_gqa)


def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    inside = F.pad(torch.ones_like(input, dtype=torch.bool), pad)
    return torch.where(inside, F.pad(input, pad), value).to(input.dtype)


def _kept(noise: Tensor, input: Tensor, p: float) -> Tensor:
    return input * ((noise >= p).to(input.dtype) / (1.0 - p)).to(input.dtype)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    _require(p >= 0.0 and p <= 1.0, "p")
    if not train or p == 0.0:
        return input
    return input * 0.0 if p == 1.0 else _kept(torch.rand_like(input, dtype=torch.float32), input, p)


def _feature_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Whole channels."""
    _require(p >= 0.0 and p <= 1.0, "p")
    if not train or p == 0.0:
        return input
    shape = [*input.shape[:2], *[1] * (input.dim() - 2)]
    return input * 0.0 if p == 1.0 else _kept(torch.rand(shape, device=input.device), input, p)


def _bernoulli_(self: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    return self.copy_(torch.rand_like(self, dtype=torch.float32) < p)


def _layer_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Tensor:
    axes = list(range(-len(normalized_shape), 0))
    x = _wide(input)
    apart = x - x.mean(axes, keepdim=True)
    y = apart * torch.rsqrt((apart * apart).mean(axes, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(input.dtype)


def _batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
                running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool) -> Tensor:
    """With a momentum of one, torch's leaves the batch's own statistics."""
    if not training or running_mean is None or running_var is None:
        return torch.batch_norm(input, weight, bias, running_mean, running_var, training, 0.0, eps, cudnn_enabled)
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = torch.batch_norm(input, weight, bias, mean, var, True, 1.0, eps, cudnn_enabled)
    with torch.no_grad():
        running_mean.copy_(running_mean * (1.0 - momentum) + mean * momentum)
        running_var.copy_(running_var * (1.0 - momentum) + var * momentum)
    return result


def _cross_entropy_loss(input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
                        ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    """It is linear in label_smoothing."""
    _require(label_smoothing >= 0.0 and label_smoothing <= 1.0, "label_smoothing")
    name = ("none", "mean", "sum")[reduction]
    plain = F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=name)
    if label_smoothing == 0.0:
        return plain
    flat = F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=name, label_smoothing=1.0)
    return plain * (1.0 - label_smoothing) + flat * label_smoothing


def _huber_loss(input: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    _require(delta > 0.0, "delta")
    apart = (input - target).abs()
    return _reduced(torch.where(apart <= delta, 0.5 * apart * apart, (apart - 0.5 * delta) * delta), reduction)


def _smooth_l1_loss(input: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    _require(beta >= 0.0, "beta")
    apart = (input - target).abs()
    return _reduced(torch.where(apart < beta, 0.5 * apart * apart / beta, apart - 0.5 * beta), reduction)


def _triplet_margin_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2,
                         eps: float = 1e-6, swap: bool = False, reduction: int = 1) -> Tensor:
    near = F.pairwise_distance(anchor, positive, p, eps)
    far = F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.min(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((near - far + margin).clamp_min(0.0), reduction)


def _margin_ranking_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0,
                         reduction: int = 1) -> Tensor:
    return _reduced((-target * (input1 - input2) + margin).clamp_min(0.0), reduction)


def _hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0, reduction: int = 1) -> Tensor:
    far = torch.where(target != 1, (margin - input).clamp_min(0.0), 0.0)
    return _reduced(far + torch.where(target != -1, input, 0.0), reduction)


def _cosine_embedding_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0,
                           reduction: int = 1) -> Tensor:
    sizes = ((input1 * input1).sum(-1) + 1e-12) * ((input2 * input2).sum(-1) + 1e-12)
    alike = (input1 * input2).sum(-1) / sizes.sqrt()
    near = torch.where(target == 1, 1.0 - alike, 0.0)
    return _reduced(near + torch.where(target == -1, (alike - margin).clamp_min(0.0), 0.0), reduction)


def _quantile(input: Tensor, q: float, dim: int | None = None, keepdim: bool = False, *,
              interpolation: str = "linear") -> Tensor:
    _require(q >= 0.0 and q <= 1.0, "q")
    at = torch.full((), 1.0, dtype=input.dtype, device=input.device) * q
    return torch.quantile(input, at, dim, keepdim, interpolation=interpolation)


def _assert(condition: object, message: object) -> None:
    assert condition, message


def _prod(sizes: Sequence[float]) -> float:
    return math.prod(sizes)


def _max(sizes: Sequence[float]) -> float:
    return max(sizes)


def _min(sizes: Sequence[float]) -> float:
    return min(sizes)


def _sqrt(size: float) -> float:
    return math.sqrt(size)


def _equal(input: Tensor, other: Tensor) -> bool:
    """A comparison as others, so that a check of it which only raises is one of the graph."""
    return input.shape == other.shape and bool((input == other).all())


def _allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


def _is_tracing() -> bool:
    return False


class _Instead(NamedTuple):
    function: Callable[..., object]
    numbers: tuple[str, ...]  # its parameters that may be symbolic
    of_any_type: bool = False  # whether it has the types of torch's under autocast, too


_nn = nn_functions
_INSTEAD: dict[object, _Instead] = {
    _nn.elu: _Instead(_elu, ("alpha", "scale", "input_scale")),
    torch.celu: _Instead(_celu, ("alpha",)),
    _nn.hardtanh: _Instead(_hardtanh, ("min_val", "max_val")),
    _nn.softshrink: _Instead(_softshrink, ("lambd",)),
    torch.logit: _Instead(_logit, ("eps",)),
    torch.nan_to_num: _Instead(_nan_to_num, ("nan", "posinf", "neginf")),
    torch.round: _Instead(_round, ("decimals",)),
    torch.roll: _Instead(_roll, ("shifts",), True),
    torch.linalg.vector_norm: _Instead(_vector_norm, ("ord",)),
    torch.dist: _Instead(_dist, ("p",)),
    torch.addmm: _Instead(_addmm, ("beta", "alpha")),
    _nn.scaled_dot_product_attention: _Instead(_attention, ("scale",), True),
    _nn.pad: _Instead(_pad, ("value",), True),
    torch.dropout: _Instead(_dropout, ("p",), True),
    torch.feature_dropout: _Instead(_feature_dropout, ("p",), True),
    torch.layer_norm: _Instead(_layer_norm, ("eps",)),
    torch.batch_norm: _Instead(_batch_norm, ("momentum",)),
    _nn.cross_entropy_loss: _Instead(_cross_entropy_loss, ("label_smoothing",), True),
    _nn.huber_loss: _Instead(_huber_loss, ("delta",)),
    _nn.smooth_l1_loss: _Instead(_smooth_l1_loss, ("beta",)),
    torch.triplet_margin_loss: _Instead(_triplet_margin_loss, ("margin",)),
    torch.margin_ranking_loss: _Instead(_margin_ranking_loss, ("margin",)),
    torch.hinge_embedding_loss: _Instead(_hinge_embedding_loss, ("margin",)),
    torch.cosine_embedding_loss: _Instead(_cosine_embedding_loss, ("margin",)),
    torch.quantile: _Instead(_quantile, ("q",)),
    # Python functions of torch's, which lead to those above.
    **{function: _Instead(function, (name,), True) for name, functions in {
        "p": (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.normalize), "label_smoothing": (F.cross_entropy,),
        "alpha": (F.elu, F.celu), "eps": (F.layer_norm,), "momentum": (F.batch_norm,), "delta": (F.huber_loss,),
        "beta": (F.smooth_l1_loss,), "margin": (F.triplet_margin_loss, F.margin_ranking_loss, F.hinge_embedding_loss,
                                                F.cosine_embedding_loss)}.items() for function in functions},
    F.hardtanh: _Instead(F.hardtanh, ("min_val", "max_val"), True),
}
# Functions and methods that Dynamo would call while it captures, or in a graph, or cut the graph at.
_IN_PYTHON: dict[object, Callable[..., object]] = {python_assert: _assert, is_tracing: _is_tracing,
                              torch.equal: _equal, "equal": _equal, torch.allclose: _allclose, "allclose": _allclose}
# NumPy's, of sizes: Dynamo would make tensors of these, whose results would be no numbers.
_OF_SIZES: dict[object, Callable[..., object]] = {np.prod: _prod, np.max: _max, np.min: _min, np.sqrt: _sqrt}
# The same as arguments, of map() for one: Python functions, whose calls Dynamo reads.
_CALLING: dict[object, Callable[..., object]] = {
    np.prod: lambda sizes: np.prod(sizes), np.max: lambda sizes: np.max(sizes), np.min: lambda sizes: np.min(sizes),
    np.sqrt: lambda size: np.sqrt(size)}
_METHODS = {"norm": _Instead(_norm, ("p",)), "bernoulli_": _Instead(_bernoulli_, ("p",), True),
            **{name: _INSTEAD[getattr(torch, name)]
               for name in ("roll", "round", "nan_to_num", "logit", "addmm", "dist", "quantile")}}
_signature = functools.cache(inspect.signature)


def _changes(argument: _torch.Value) -> bool:
    """Whether a value of Dynamo's is a number that changes, or has one, and not made of the sizes of tensors alone."""
    if isinstance(argument, _torch.LazyVariableTracker):
        argument = argument.realize()
    if not isinstance(argument, _torch.SymNodeVariable):
        return isinstance(argument, _torch.BaseListVariable) and any(map(_changes, argument.items))
    node = getattr(argument.sym_num, "node", None)
    if node is None:
        return False
    sources = node.shape_env.var_to_sources
    return not all([isinstance(source, _torch.TensorPropertySource) for symbol in node.expr.free_symbols
                    for source in sources.get(symbol, [None])])


def _chosen(instead: _Instead | None, given: Sequence[object], named: _torch.Named) -> Callable[..., object] | None:
    """What Dynamo captures for a call with these arguments; None: the call itself."""
    if instead is None or not instead.of_any_type and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return None
    try:
        arguments = _signature(instead.function).bind(*given, **named).arguments
    except TypeError:  # another form of the function
        return None
    return instead.function if any(_changes(arguments[name]) for name in instead.numbers if name in arguments) else None


def _in_tensors(plain: Callable[..., object]) -> Callable[..., object]:
    """Dynamo's reading of a call in Python, of a function of torch that goes into the graph."""
    def call_function(self: _torch.Translator, fn: Any, args: _torch.Values, kwargs: _torch.Named) -> None:
        fn = fn.realize() if isinstance(fn, _torch.LazyVariableTracker) else fn
        if isinstance(fn, _torch.TorchInGraphFunctionVariable):
            try:
                chosen = _IN_PYTHON.get(fn.value) or _chosen(_INSTEAD.get(fn.value), args, kwargs)
            except TypeError:  # it has no hash
                chosen = None
            fn = fn if chosen is None else _torch.UserFunctionVariable(chosen)
        plain(self, fn, args, kwargs)

    return call_function


def _methods_in_tensors(plain: Callable[..., object]) -> Callable[..., object]:
    """call_method of Dynamo's variable for a tensor."""
    def call_method(self: Any, tx: _torch.Translator, name: str, args: _torch.Values, kwargs: _torch.Named) -> object:
        chosen = _IN_PYTHON.get(name) or _chosen(_METHODS.get(name), [self, *args], kwargs)
        return plain(self, tx, name, args, kwargs) if chosen is None else _torch.UserFunctionVariable(
            chosen).call_function(tx, [self, *args], kwargs)

    return call_method


def _is_size(value: _torch.Value) -> bool:
    """Whether a value of Dynamo's is a whole number that is not negative, as sizes are."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    value = value.realize() if isinstance(value, _torch.LazyVariableTracker) else value
    if isinstance(value, _torch.ConstantVariable):
        return type(value.value) is int and value.value >= 0
    return (isinstance(value, _torch.SymNodeVariable) and isinstance(value.sym_num, torch.SymInt)
            and statically_known_true(value.sym_num >= 0))


def _numbers_of_numpy(plain: Callable[..., None]) -> Callable[..., None]:
    """Dynamo's reading of a call in Python, of a function of NumPy's."""
    def call_function(self: _torch.Translator, fn: Any, args: _torch.Values, kwargs: _torch.Named) -> None:
        args = [_torch.UserFunctionVariable(_CALLING[arg.value]) if isinstance(arg, _torch.NumpyVariable)
                and callable(arg.value) and arg.value in _CALLING else arg for arg in args]
        if not isinstance(fn, _torch.NumpyVariable) or kwargs or not callable(fn.value):
            return plain(self, fn, args, kwargs)
        values = [arg.as_python_constant() if arg.is_python_constant() else None for arg in args]
        if isinstance(fn.value, np.ufunc) and fn.value.nout == 1 and all(
                type(value) in (int, float) for value in values):
            return self.push(_torch.ConstantVariable.create(fn.value(*values).item()))
        instead = _OF_SIZES.get(fn.value)
        sizes = args if instead is _sqrt else [
            size for arg in args if isinstance(arg, _torch.BaseListVariable) for size in arg.items]
        fits = instead is not None and len(args) == 1 and sizes and all(map(_is_size, sizes))
        return plain(self, _torch.UserFunctionVariable(instead) if fits else fn, args, kwargs)

    return call_function


def to_numpy(value: object) -> object:
    """A result of NumPy's as Python has it: where there are no axes it is a scalar, which Dynamo makes an array."""
    found = _torch.to_numpy_helper(value)
    return found[()] if getattr(found, "ndim", None) == 0 else found


leave_alone(to_numpy)


def _scalars_of_numpy(plain: Callable[..., None]) -> Callable[..., None]:
    """load_import_from of Dynamo's code generator."""
    def load_import_from(self: object, module_name: str, object_name: str) -> None:
        ours = object_name == "to_numpy_helper"
        plain(self, __name__ if ours else module_name, to_numpy.__name__ if ours else object_name)

    return load_import_from


@contextlib.contextmanager
def numbers_as_inputs() -> Iterator[None]:
    """Within, Dynamo captures these functions so that a number which changes is an input of the graph, and texts of
    sizes as constants.
    """
    with _python_in_forward.followed(), \
            wrapped("call", _numbers_of_numpy), wrapped("call", _in_tensors), \
            wrapped("call_of_tensors_method", _methods_in_tensors), \
            wrapped("load_import_from", _scalars_of_numpy):
        yield
