"""Functions that torch.onnx does not translate, written with those that it does: values and gradients are torch's.

rewrite.py puts them in place of torch's own while the user's forward is traced (SPECIAL, by torch's function). Where a
series loses digits it is summed in float64. Source: the asymptotic series of Abramowitz and Stegun, 6.4.12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

from onnxtrain._export import domain  # noqa: F401  defines torch.ops.onnxtrain
from onnxtrain._torch import VF, DisablePythonDispatcher, DisableTorchFunction, Reduction, disable_current_modes, pytree

# Since torch 2.14 a clamp has no slope at its bounds, and operands of clamp, fmax and fmin that are equal share theirs.
FLAT_BOUNDS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
Operand = float | Tensor
State = Tensor | tuple[Tensor, ...]  # of a recurrent cell
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)  # B2, B4 ...


def _pair(a: Operand, b: Operand, *, real: bool = False) -> list[Tensor]:
    """Both as torch promotes them, tensors or numbers; as `real` numbers where the function makes those of integers."""
    dtype = torch.result_type(a, b)
    if real and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    pair = (x.to(dtype) if isinstance(x, Tensor) else torch.as_tensor(x, dtype=dtype) for x in (a, b))
    return torch.broadcast_tensors(*pair)


def hypot(input: Tensor, other: Tensor) -> Tensor:
    """Divided by the larger operand first, so that no square overflows. Infinite beside a NaN, too."""
    input, other = _pair(input, other)
    largest = torch.maximum(input.abs(), other.abs()).detach()
    scale = torch.where((largest > 0) & (largest < math.inf), largest, torch.ones_like(largest))
    result = scale * torch.sqrt((input / scale).square() + (other / scale).square())
    return torch.where((input.abs() == math.inf) | (other.abs() == math.inf), math.inf, result)


def copysign(input: Operand, other: Operand) -> Tensor:
    """A zero has a sign as well, which its reciprocal shows. The other operand has a gradient, of zeros."""
    input, other = _pair(input, other, real=True)
    sign = other.detach()
    negative = (sign < 0) | ((sign == 0) & (sign.reciprocal() < 0))
    result = torch.where(negative, -input.abs(), input.abs())
    return torch.where(torch.zeros_like(negative), torch.sign(other), result)


def fmax(input: Tensor, other: Tensor) -> Tensor:
    input, other = _pair(input, other)
    return _shared(input, other, torch.where((input >= other) | (other != other), input, other))


def fmin(input: Tensor, other: Tensor) -> Tensor:
    input, other = _pair(input, other)
    return _shared(input, other, torch.where((input <= other) | (other != other), input, other))


def _shared(input: Tensor, other: Tensor, result: Tensor) -> Tensor:
    """Two equal operands each have half of the gradient, since torch 2.14."""
    if not FLAT_BOUNDS or not result.is_floating_point():
        return result
    return torch.where(input == other, 0.5 * input + 0.5 * other, result)


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """By doubling: after step k every entry is the sum of the last 2**k.

    Each sum is taken from its larger term, so that no power is infinite.
    """
    if not input.is_floating_point() or input.dim() == 0:
        return torch.logcumsumexp(input, dim)
    x, reach = input.movedim(dim, -1), 1
    while reach < x.shape[-1]:
        before = F.pad(x[..., :-reach], (reach, 0), value=-math.inf)
        largest = torch.maximum(x, before).detach()
        largest = torch.where(largest.abs() < math.inf, largest, torch.zeros_like(largest))
        x = torch.log(torch.exp(x - largest) + torch.exp(before - largest)) + largest
        reach *= 2
    return x.movedim(-1, dim)


def xlogy(input: Operand, other: Operand) -> Tensor:
    """Zero where the first operand is zero, whatever the logarithm, unless that is NaN. The other operand's slope is
    the quotient of both everywhere, of two zeros NaN.
    """
    input, other = _pair(input, other, real=True)
    none = (input == 0) & ((other <= 0) | (other == math.inf))
    kept = torch.where(none, input.detach(), input)
    return torch.where(none, 0.0, kept * torch.log(other))


def xlog1py(input: Operand, other: Operand) -> Tensor:
    """As xlogy; torch's decomposition is a constant where the first operand is zero, of no slope."""
    input, other = _pair(input, other, real=True)
    none = (input == 0) & ((other <= -1) | (other == math.inf))
    kept = torch.where(none, input.detach(), input)
    return torch.where(none, 0.0, kept * torch.log1p(other))


def _of_float(x: Tensor) -> bool:
    return x.is_floating_point()


def _sine(x: Tensor) -> Tensor:
    """sin(pi x), by the distance to the nearest whole number."""
    whole = torch.floor(x + 0.5).detach()
    return torch.sin(math.pi * (x - whole)) * torch.where(torch.remainder(whole, 2) == 0, 1.0, -1.0)


def polygamma(n: int, input: Tensor) -> Tensor:
    """The first derivative of digamma; higher ones are left to torch."""
    if n == 0:
        return torch.digamma(input)
    if n != 1 or not _of_float(input):
        return torch.polygamma(n, input)
    x = input.double()
    low = x < 0.5
    z = torch.where(low, 1 - x, x)
    value: Operand = 0.0
    for _ in range(8):
        value = value + 1 / (z * z)
        z = z + 1
    square = 1 / (z * z)
    series: Operand = 0.0
    for b in reversed(_BERNOULLI):
        series = (series + b) * square
    value = value + 1 / z + 0.5 * square + series / z
    sine = _sine(torch.where(low, x, 0.25))
    reflected = torch.where(x == torch.floor(x), math.inf, (math.pi / sine).square() - value)
    return torch.where(low, reflected, value).to(input.dtype)


def multigammaln(input: Tensor, p: int) -> Tensor:
    terms = [torch.lgamma(input - 0.5 * i) for i in range(p)]
    return sum(terms[1:], terms[0]) + 0.25 * p * (p - 1) * math.log(math.pi)


def index_fill(input: Tensor, dim: int, index: Tensor, value: float | Tensor) -> Tensor:
    """By a mask: an index that comes twice would give the value its gradient twice."""
    if not isinstance(value, Tensor) or input.dim() == 0:
        return torch.index_fill(input, dim, index, value)
    hit = torch.zeros(input.shape[dim], dtype=torch.bool, device=input.device).index_fill(0, index, True)
    return torch.where(hit.view([-1 if d == dim % input.dim() else 1 for d in range(input.dim())]), value, input)


def matrix_power(input: Tensor, n: int) -> Tensor:
    """The power 0 has the shape of its batch, and a gradient of zeros."""
    if n != 0:
        return torch.linalg.matrix_power(input, n)
    identity = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
    return torch.where(torch.zeros_like(input, dtype=torch.bool), input, identity)


def std_mean(input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Apart: torch's decomposition has a root of the variance, whose slope is not a number for constant rows."""
    dim = kwargs.get("dim", args[0] if args and not isinstance(args[0], bool) else None)
    keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    return torch.std(input, *args, **kwargs), torch.mean(input, dim, keepdim)


def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    """torch's own decomposition counts what stands after the first -1 of a row as label 0."""
    if size_average is not None or reduce is not None:
        reduction = Reduction.legacy_get_string(size_average, reduce)
    x, labels = torch.atleast_2d(input), torch.atleast_2d(target)  # (N, C) both
    classes = x.shape[1]
    given = (labels < 0).cumsum(1) == 0
    labels = torch.where(given, labels, 0)
    each = given.unsqueeze(2) & (labels.unsqueeze(2) == torch.arange(classes))  # (N, label, class)
    counted = given.unsqueeze(2) & each.any(1).logical_not().unsqueeze(1)
    margins = 1 - x.gather(1, labels).unsqueeze(2) + x.unsqueeze(1)
    losses = torch.where(counted & (margins > 0), margins, 0.0).sum((1, 2)) / classes
    if reduction == "none":
        return losses if input.dim() == 2 else losses.squeeze(0)
    return losses.sum() if reduction == "sum" else losses.mean()


def multi_margin_loss(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None,
    size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:
    """torch's own decomposition has a slope where a margin is met exactly."""
    if size_average is not None or reduce is not None:
        reduction = Reduction.legacy_get_string(size_average, reduce)
    x, label = torch.atleast_2d(input), torch.atleast_1d(target).unsqueeze(1)  # (N, C), (N, 1)
    margins = margin - x.gather(1, label) + x
    margins = torch.where((margins > 0) & (label != torch.arange(x.shape[1])), margins, 0.0)
    terms = margins if p == 1 else margins * margins
    if weight is not None:
        terms = terms * weight[label]
    losses = terms.sum(1) / x.shape[1]
    if reduction == "none":
        return losses if input.dim() == 2 else losses.squeeze(0)
    return losses.sum() if reduction == "sum" else losses.mean()


def interpolate(
    input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Tensor:
    """F.interpolate; by fractions that do not divide, torch.onnx's coordinates are not torch's in most modes, nor
    are their filters of antialiasing where corners are aligned.

    There it is a matrix for each dim, what torch's own kernel makes of the unit vectors: sizes become part of the
    export.
    """
    rank = input.dim() - 2
    scales = [scale_factor] * rank if isinstance(scale_factor, (int, float)) else scale_factor
    whole = size is not None or not scales or all(float(s).is_integer() for s in scales)
    if whole and not (antialias and align_corners) or size is not None and scales:
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    sizes = None if size is None else [int(s) for s in ([size] * rank if isinstance(size, (int, SymInt)) else size)]
    for d in range(rank):
        if sizes[d] != int(input.shape[d + 2]) if sizes else scales[d] != 1.0:
            rows = _resizing(int(input.shape[d + 2]), d, rank, sizes[d] if sizes else None,
                             float(scales[d]) if scales else None, mode, align_corners,
                             recompute_scale_factor, antialias)
            if mode.startswith("nearest"):
                at = torch.tensor([row.index(1.0) for row in rows])
                input = input.index_select(d + 2, at)
                continue
            matrix = torch.tensor(rows, dtype=input.dtype)  # (out, in)
            input = torch.matmul(input.movedim(d + 2, -1), matrix.transpose(0, 1)).movedim(-1, d + 2)
    return input


def _resizing(
    n: int, d: int, rank: int, size: int | None, scale: float | None, mode: str, align_corners: bool | None,
    recompute: bool | None, antialias: bool
) -> list[list[float]]:
    # Without the dispatcher in Python, where an export has decompositions that are not the kernels' equal.
    with disable_current_modes(), DisablePythonDispatcher(), torch.no_grad():
        shape = [1, n, *(n if k == d else 1 for k in range(rank))]
        sizes = None if size is None else tuple(size if k == d else 2 for k in range(rank))
        scales = None if scale is None else tuple(scale if k == d else 1.0 for k in range(rank))
        # Two of each other dim: with one, torch 2.13 treats the unit vectors as channels-last and mixes them up.
        unit = torch.eye(n, dtype=torch.float64).view(shape).expand(1, n,
                                                                    *(n if k == d else 2 for k
                                                                      in range(rank))).contiguous()
        out = F.interpolate(unit, sizes, scales, mode, align_corners, recompute, antialias)
        return out[(0, slice(None), *(slice(None) if k == d else 0 for k in range(rank)))].t().tolist()


def taken_apart(name: str) -> Callable[..., Any]:
    """torch's function of this name, in the operators that it is composed of where autocast is on.

    Autocast then sees each of them, as it does in eager. torch.export keeps the composition whole, and takes it apart
    after the region of autocast.
    """
    theirs, whole = getattr(VF, name), getattr(torch.ops.aten, name).default

    def call(*args: object, **kwargs: object) -> Any:
        if not _autocast():
            return theirs(*args, **kwargs)
        with DisableTorchFunction():  # of the tensors' class, which would call the whole in its place
            return whole.decompose(*args, **kwargs)

    return call


def _autocast() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _cell(gates: Callable[..., State], whole: Callable[..., State] | None = None) -> Callable[..., State]:
    """A recurrent cell. torch's own decomposition runs each operator of the program once more, which takes most of an
    export where a cell is called at each step of a sequence.

    Args:
        gates: what the cell makes of its two products and its state; autocast casts the operands of the products.
        whole: the cell as one operator.
    """
    def cell(input: Tensor, hx: Tensor | Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
             b_hh: Tensor | None = None) -> State:
        state = hx if isinstance(hx, (tuple, list)) else (hx,)
        if whole is not None and not _autocast():
            return whole(input, *state, w_ih, w_hh, b_ih, b_hh)
        return gates(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state[-1])

    return cell


def _gru(input: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
    (reset, update, new), (of_reset, of_update, of_new) = input.chunk(3, 1), hidden.chunk(3, 1)
    kept = torch.sigmoid(of_update + update)
    new = torch.tanh(new + of_new * torch.sigmoid(of_reset + reset))
    return (state - new) * kept + new


def _lstm(input: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    enter, forget, new, leave = (hidden + input).chunk(4, 1)
    state = torch.sigmoid(forget) * state + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(state), state


def inner(input: Tensor, other: Tensor) -> Tensor:
    if not _autocast():
        return torch.inner(input, other)
    return taken_apart("tensordot")(input, other, [-1], [-1]) if input.dim() and other.dim() else input * other


def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    if not _autocast():
        return torch.linalg.multi_dot(tensors)
    first, last = tensors[0].dim() == 1, tensors[-1].dim() == 1
    matrices = [tensors[0].unsqueeze(0) if first else tensors[0], *tensors[1:-1],
                tensors[-1].unsqueeze(1) if last else tensors[-1]]
    product = chain_matmul(*matrices)
    return product[(0 if first else slice(None), 0 if last else slice(None))]


def chain_matmul(*matrices: Tensor) -> Tensor:
    return taken_apart("chain_matmul")(matrices)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0,
          compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Tensor:
    """Of equal rows the gradient is 0, and not that of the root of 0. Between many rows that are not multiplied as
    matrices torch computes, which holds no difference of two rows in memory.
    """
    many = x1.size(-2) > 25 or x2.size(-2) > 25
    if p == 2 and (compute_mode == "use_mm_for_euclid_dist" or many and compute_mode.endswith("if_necessary")):
        norms = [x.square().sum(-1, keepdim=True) for x in (x1, x2)]
        rows = torch.cat([x1 * -2, norms[0], torch.ones_like(norms[0])], -1)
        columns = torch.cat([x2, torch.ones_like(norms[1]), norms[1]], -1).transpose(-2, -1)
        squares = rows.matmul(columns)
    elif many or p not in (1, 2):
        return torch.cdist(x1, x2, p, compute_mode)
    else:
        differences = x1.unsqueeze(-2) - x2.unsqueeze(-3)
        if p == 1:
            return differences.abs().sum(-1)
        squares = differences.square().sum(-1)
    equal = squares <= 0
    return squares.masked_fill(equal, 1).sqrt().masked_fill(equal, 0)


def _of_fixed_ends(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch reads the ends where they are tensors: they have no gradient."""
    def spaced(*args: object, **kwargs: object) -> Tensor:
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        return function(*args, **kwargs)

    return spaced


_METHODS = ("hypot", "copysign", "fmax", "fmin",
            "logcumsumexp", "xlogy", "index_fill", "inner")
SPECIAL: dict[object, Callable[..., Any]] = {
    torch.polygamma: polygamma,
    torch.special.polygamma: polygamma,
    torch.special.xlogy: xlogy,
    torch.special.xlog1py: xlog1py,
    torch.std_mean: std_mean,
    torch.gru_cell: _cell(_gru, torch.ops.onnxtrain.gru_cell),
    torch.lstm_cell: _cell(_lstm, torch.ops.onnxtrain.lstm_cell),
    torch.rnn_tanh_cell: _cell(lambda input, hidden, _: torch.tanh(hidden + input)),
    torch.rnn_relu_cell: _cell(lambda input, hidden, _: torch.relu(hidden + input)),
    torch.chain_matmul: chain_matmul,
    torch.linalg.multi_dot: multi_dot,
    torch.cdist: cdist,
    torch.linspace: _of_fixed_ends(torch.linspace),
    torch.logspace: _of_fixed_ends(torch.logspace),
    torch.linalg.matrix_power: matrix_power,
    torch.matrix_power: matrix_power,
    torch.Tensor.matrix_power: matrix_power,
    torch.special.multigammaln: multigammaln,
    torch.mvlgamma: multigammaln,
    torch.Tensor.mvlgamma: multigammaln,
    **{getattr(owner, name): globals()[name] for name in _METHODS for owner in (torch, torch.Tensor)},
}
