"""The rows of operators.py: a name, a function or module of torch, and what it is called with."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import nn

Spec = Callable[[], torch.Tensor]


def R(*shape: int) -> Spec:
    """Normal numbers, with a gradient."""
    return lambda: torch.randn(shape).requires_grad_()


def P(*shape: int) -> Spec:
    """Numbers of 0.1 to 1.1, with a gradient."""
    return lambda: (torch.rand(shape) + 0.1).requires_grad_()


def N(*shape: int) -> Spec:
    """Numbers of 0 to 1, without a gradient."""
    return lambda: torch.rand(shape)


def I(high: int, *shape: int) -> Spec:  # noqa: E743 - as the operators' contract has it
    """Integers below `high`."""
    return lambda: torch.randint(high, shape)


def B(*shape: int) -> Spec:
    """Bools."""
    return lambda: torch.rand(shape) > 0.5


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


class First(nn.Module):
    """A recurrent module's output without its state."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)[0]


@dataclasses.dataclass
class Row:
    name: str
    what: Callable[..., Any]
    specs: tuple[Spec, ...]

    def make(self) -> tuple[nn.Module, list[torch.Tensor]]:
        made = self.what() if isinstance(self.what, Build) else Call(self.what)
        return made, [spec() for spec in self.specs]


@dataclasses.dataclass
class Build:
    """Makes a module when its row is measured."""

    module: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.module()


ROWS: list[Row] = []


def shape_text(spec: Spec) -> str:
    with torch.no_grad():
        cells = spec.__closure__ or ()
    shape = next((c.cell_contents for c in cells if isinstance(c.cell_contents, tuple)), ())
    return "x".join(map(str, shape))


def add(name: str, what: Callable[..., Any], *specs: Spec) -> None:
    ROWS.append(Row(f"{name} {' '.join(map(shape_text, specs))}"[:51], what, specs))


def module(name: str, make: Callable[[], nn.Module], *specs: Spec) -> None:
    add(name, Build(make), *specs)


# ---- norms ----

for shape in [(1568, 640), (4096, 64), (256, 1024), (65536, 16), (200000, 3), (64, 8192), (3000, 77)]:
    module("BatchNorm1d", lambda c=shape[1]: nn.BatchNorm1d(c), R(*shape))
module("BatchNorm1d+ReLU", lambda: nn.Sequential(nn.BatchNorm1d(640), nn.ReLU()), R(1568, 640))
module("BatchNorm1d eval", lambda: nn.BatchNorm1d(640).eval(), R(1568, 640))
for shape in [(256, 64, 16), (256, 256, 7), (512, 128, 4), (1024, 512, 2), (64, 64, 300), (4, 16, 20000)]:
    module("BatchNorm1d", lambda c=shape[1]: nn.BatchNorm1d(c), R(*shape))
for shape in [(32, 64, 28, 28), (32, 512, 7, 7), (64, 1024, 2, 2), (128, 512, 3, 3), (256, 2048, 1, 1), (2, 3, 512, 512)]:
    module("BatchNorm2d", lambda c=shape[1]: nn.BatchNorm2d(c), R(*shape))
module("BatchNorm2d+ReLU", lambda: nn.Sequential(nn.BatchNorm2d(512), nn.ReLU()), R(128, 512, 2, 2))
module("BatchNorm2d eval", lambda: nn.BatchNorm2d(512).eval(), R(64, 512, 4, 4))
module("BatchNorm3d", lambda: nn.BatchNorm3d(32), R(4, 32, 8, 16, 16))
module("BatchNorm3d", lambda: nn.BatchNorm3d(256), R(64, 256, 1, 2, 2))
for shape in [(2048, 768), (65536, 16), (200000, 4), (64, 8192), (4, 100000), (512, 197, 9), (3000, 333)]:
    module("LayerNorm", lambda n=shape[-1]: nn.LayerNorm(n), R(*shape))
module("LayerNorm over two", lambda: nn.LayerNorm((16, 64)), R(256, 16, 64))
module("LayerNorm no affine", lambda: nn.LayerNorm(768, elementwise_affine=False), R(2048, 768))
for shape in [(2048, 768), (65536, 16), (64, 8192)]:
    module("RMSNorm", lambda n=shape[-1]: nn.RMSNorm(n), R(*shape))
for groups, shape in [(32, (16, 64, 32, 32)), (8, (16, 512, 4, 4)), (1, (16, 64, 32, 32)), (32, (512, 256)), (4, (2, 16, 128, 128))]:
    module(f"GroupNorm {groups}", lambda g=groups, c=shape[1]: nn.GroupNorm(g, c), R(*shape))
module("InstanceNorm1d", lambda: nn.InstanceNorm1d(64, affine=True), R(64, 64, 100))
module("InstanceNorm2d", lambda: nn.InstanceNorm2d(64), R(16, 64, 32, 32))
module("InstanceNorm2d", lambda: nn.InstanceNorm2d(512), R(32, 512, 4, 4))
module("InstanceNorm3d", lambda: nn.InstanceNorm3d(16), R(4, 16, 8, 16, 16))
module("LocalResponseNorm", lambda: nn.LocalResponseNorm(5), R(8, 64, 27, 27))
add("normalize", lambda x: F.normalize(x, dim=-1), R(4096, 256))
add("normalize dim 1", lambda x: F.normalize(x, dim=1), R(16, 256, 14, 14))

# ---- over an axis ----

LAYOUTS = [((1000, 1000), 1), ((1000, 1000), 0), ((200000, 5), 1), ((5, 200000), 0), ((200000, 3), 0), ((64, 128, 128), 1),
           ((128, 100, 4), 1), ((4096, 64, 3), 1), ((64, 3, 64, 64), 1), ((16, 21, 64, 64), 1), ((32, 64, 16, 16), (2, 3)),
           ((32, 64, 16, 16), (0, 2, 3)), ((1000, 1000), None)]
AXIS: list[tuple[str, Callable[..., Any]]] = [
    ("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("amin", torch.amin), ("var", torch.var),
    ("std", torch.std), ("norm", torch.linalg.vector_norm), ("logsumexp", torch.logsumexp),
]
ALONE: list[tuple[str, Callable[..., Any]]] = [
    ("softmax", torch.softmax), ("log_softmax", torch.log_softmax), ("prod", torch.prod), ("argmax", torch.argmax),
    ("cumsum", torch.cumsum), ("cumprod", torch.cumprod), ("max values", lambda x, d: x.max(d)[0]),
    ("int max", lambda x, d: x.long().amax(d)),
    ("l1 norm", lambda x, d: x.abs().sum(d)), ("any", lambda x, d: (x > 0).any(d)), ("median", lambda x, d: x.median(d)[0]),
    ("glu", lambda x, d: F.glu(x, d)), ("logcumsumexp", torch.logcumsumexp),
]
for shape, axis in LAYOUTS:
    where = "" if axis is None else f" axis {axis}"
    for name, f in AXIS:
        if axis is None and name in ("logsumexp", "amax", "amin"):
            continue
        add(name + where, (lambda x, f=f: f(x)) if axis is None else lambda x, f=f, a=axis: f(x, dim=a), R(*shape))
    if isinstance(axis, int):
        for name, f in ALONE:
            if name == "glu" and shape[axis] % 2 or name in ("median", "logcumsumexp") and shape != (1000, 1000):
                continue
            add(name + where, lambda x, f=f, a=axis: f(x, a), R(*shape))

# ---- elementwise ----

UNARY = {
    "relu": F.relu, "gelu": F.gelu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "elu": F.elu, "selu": F.selu, "celu": F.celu, "leaky_relu": F.leaky_relu, "softplus": F.softplus,
    "softsign": F.softsign, "mish": F.mish, "hardtanh": F.hardtanh, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid,
    "relu6": F.relu6, "logsigmoid": F.logsigmoid, "softshrink": F.softshrink, "hardshrink": F.hardshrink,
    "tanhshrink": F.tanhshrink, "threshold": lambda x: F.threshold(x, 0.1, 20.0), "exp": torch.exp, "sin": torch.sin,
    "cos": torch.cos, "tan": torch.tan, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "asinh": torch.asinh,
    "erf": torch.erf, "abs": torch.abs, "sign": torch.sign, "floor": torch.floor, "round": torch.round, "square": torch.square,
    "neg": torch.neg, "clamp": lambda x: x.clamp(-0.5, 0.5), "clamp_min": lambda x: x.clamp_min(0.1), "pow 3": lambda x: x**3,
    "expm1": torch.expm1, "isnan": torch.isnan, "nan_to_num": torch.nan_to_num, "fmod": lambda x: torch.fmod(x, 0.3),
    "remainder": lambda x: torch.remainder(x, 0.3), "to int": lambda x: x.to(torch.int64), "to half": lambda x: x.half(),
    "to double": lambda x: x.double(), "to bool": lambda x: x.bool(),
}
for name, f in UNARY.items():
    add(name, f, R(1000, 1000))
for name, f in {"log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "log1p": torch.log1p,
                "log2": torch.log2, "pow 2.5": lambda x: x**2.5, "xlogy": lambda x: torch.xlogy(x, x), "exp2": torch.exp2,
                "asin": lambda x: torch.asin(x * 0.9), "acosh": lambda x: torch.acosh(x + 1),
                "logit": lambda x: torch.logit(x, 0.05), "lgamma": torch.lgamma, "digamma": torch.digamma,
                "erfinv": lambda x: torch.erfinv(x * 0.9)}.items():
    add(name, f, P(1000, 1000))
add("pow of a scalar", lambda x: 2.0**x, R(1000, 1000))
module("PReLU", lambda: nn.PReLU(64), R(16, 64, 32, 32))
module("PReLU 1", lambda: nn.PReLU(), R(16, 64, 32, 32))
BINARY = {"add": torch.add, "mul": torch.mul}
PATTERNS = [((1000, 1000), (1000, 1000)), ((1000, 1000), (1000,)), ((1000, 1000), (1000, 1)), ((1000, 1), (1, 1000)),
            ((1000, 1000), (1,)), ((200000, 5), (5,)), ((200000, 5), (200000, 1)), ((32, 64, 32, 32), (64, 1, 1)),
            ((32, 64, 7, 7), (1, 64, 1, 1)), ((32, 64, 32, 32), (32, 1, 32, 32)), ((32, 64, 32, 32), (32, 64, 1, 1)),
            ((256, 1024, 3), (1024, 3)), ((256, 1024, 3), (256, 1, 3)), ((64, 1, 128, 128), (64, 1, 1, 128)),
            ((16, 8, 64, 64), (8, 64, 64)), ((16, 1, 64, 64), (1, 8, 64, 64)), ((4096, 1, 64), (1, 16, 64)),
            ((128, 64, 1, 64), (128, 1, 64, 64)), ((1024, 16, 1), (1024, 1, 64)), ((50, 2, 50, 2, 50), (2, 1, 2, 1)),
            ((64, 64, 16, 16), (1, 1, 16, 1)), ((64, 64, 16, 16), (64, 1, 16, 1))]
for left, right in PATTERNS:
    for name, f in BINARY.items():
        add(name, f, R(*left), R(*right))
for name, f in {"sub": torch.sub, "div": torch.div, "maximum": torch.maximum, "minimum": torch.minimum, "pow": torch.pow,
                "atan2": torch.atan2, "hypot": torch.hypot, "lerp": lambda x, y: torch.lerp(x, y, 0.3),
                "addcmul": lambda x, y: torch.addcmul(x, x, y), "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
                "logaddexp": torch.logaddexp, "greater": torch.gt, "eq": torch.eq}.items():
    add(name, f, P(1000, 1000), P(1000, 1000))
add("div", torch.div, R(1000, 1000), P(1000, 1))
add("div", torch.div, R(1000, 1000), P(1000))
add("add 4 operands", lambda a, b, c, d: a + b + c + d, *[R(1000, 1000)] * 4)
add("where", torch.where, B(1000, 1000), R(1000, 1000), R(1000, 1000))
add("where", torch.where, B(1000, 1), R(1000, 1000), R(1000, 1000))
add("where", torch.where, B(1000), R(1000, 1000), R(1000, 1000))
add("where scalar", lambda m, x: torch.where(m, x, 0.0), B(1000, 1000), R(1000, 1000))
add("where", torch.where, B(64, 1, 64, 64), R(64, 8, 64, 64), R(8, 1, 1))
add("masked_fill", lambda x, m: x.masked_fill(m, -1e9), R(1000, 1000), B(1000, 1000))
add("masked_fill", lambda x, m: x.masked_fill(m, -1e9), R(16, 8, 128, 128), B(16, 1, 1, 128))
add("tril", torch.tril, R(64, 128, 128))
add("int add", torch.add, I(100, 1000, 1000), I(100, 1000, 1000))
add("int div", lambda x: x // 7, I(100, 1000, 1000))
add("int div of tensors", lambda x, y: x // (y + 1), I(100, 1000, 1000), I(100, 1000, 1000))
add("int mod", lambda x: x % 7, I(100, 1000, 1000))
add("bool and", torch.logical_and, B(1000, 1000), B(1000, 1000))
add("int to float", lambda x: x.float(), I(100, 1000, 1000))
add("bool to float", lambda x: x.float(), B(1000, 1000))

# ---- layout ----

for shape, perm in [((1000, 1000), (1, 0)), ((200000, 3), (1, 0)), ((3, 200000), (1, 0)), ((16, 12, 64, 64), (0, 2, 1, 3)),
                    ((32, 64, 28, 28), (0, 2, 3, 1)), ((32, 28, 28, 64), (0, 3, 1, 2)), ((32, 3, 112, 112), (0, 2, 3, 1)),
                    ((64, 32, 32, 16), (3, 2, 1, 0)), ((16, 16, 16, 16, 16), (4, 1, 3, 0, 2)), ((100, 100, 100), (2, 0, 1)),
                    ((8, 14, 7, 14, 7, 96), (0, 1, 3, 2, 4, 5)), ((1024, 2, 512), (1, 0, 2)), ((512, 512, 2), (1, 0, 2)),
                    ((512, 512, 2), (2, 0, 1))]:
    add(f"permute {perm}", lambda x, p=perm: x.permute(p).contiguous() + 0.0, R(*shape))
for axis, shape in [(0, (500, 1000)), (1, (500, 1000)), (-1, (100000, 4)), (1, (32, 32, 28, 28)), (2, (32, 64, 8, 64))]:
    add(f"cat {axis}", lambda x, y, a=axis: torch.cat([x, y, x], a), R(*shape), R(*shape))
add("cat of 32", lambda x: torch.cat([x[:, i:i + 1] for i in range(31, -1, -1)], 1), R(2000, 32, 16))
for axis in (0, 1, -1):
    add(f"stack {axis}", lambda x, y, a=axis: torch.stack([x, y, x], a), R(500, 1000), R(500, 1000))
add("split", lambda x: x.split(256, 1), R(1000, 1024))
add("chunk last", lambda x: x.chunk(3, -1), R(100000, 12))
add("unbind", lambda x: torch.unbind(x, 1), R(2000, 8, 64))
add("slice", lambda x: x[:, 10:900], R(1000, 1000))
add("slice step 2", lambda x: x[:, ::2], R(1000, 2000))
add("slice rows step 2", lambda x: x[::2], R(2000, 1000))
add("slice 4d", lambda x: x[:, :, 1:-1, 1:-1], R(32, 64, 30, 30))
add("narrow columns", lambda x: x[:, 3:5] * 2, R(100000, 32))
for mode, size, shape in [("constant", (1, 1, 1, 1), (32, 64, 28, 28)), ("reflect", (1, 1, 1, 1), (32, 64, 28, 28)),
                          ("replicate", (1, 1, 1, 1), (32, 64, 28, 28)), ("circular", (1, 1, 1, 1), (32, 64, 28, 28)),
                          ("constant", (0, 5), (100000, 10)), ("constant", (0, 0, 2, 2), (1000, 100, 8)),
                          ("reflect", (3, 3), (64, 64, 250)), ("constant", (-1, -1), (1000, 1000))]:
    add(f"pad {mode} {size}", lambda x, m=mode, s=size: F.pad(x, s, mode=m), R(*shape))
for axes, shape in [((0,), (1000, 1000)), ((1,), (1000, 1000)), ((2, 3), (32, 64, 28, 28)), ((1,), (1000, 32, 32))]:
    add(f"flip {axes}", lambda x, a=axes: x.flip(a), R(*shape))
for shift, axes, shape in [(3, 1, (1000, 1000)), (100, 0, (1000, 1000)), ((3, 3), (1, 2), (16, 28, 28, 96))]:
    add(f"roll {shift} {axes}", lambda x, s=shift, a=axes: torch.roll(x, s, a), R(*shape))
add("expand last", lambda x: x.expand(1000, 1000) * 1.5, R(1000, 1))
add("expand first", lambda x: x.expand(1000, 1000).contiguous(), R(1, 1000))
add("expand inner", lambda x: x.expand(64, 64, 8, 32).contiguous(), R(64, 64, 1, 32))
add("repeat", lambda x: x.repeat(2, 3), R(500, 400))
add("repeat 3d", lambda x: x.repeat(1, 8, 1), R(1000, 16, 8))
add("repeat_interleave", lambda x: x.repeat_interleave(4, 1), R(1000, 256))
add("repeat_interleave rows", lambda x: x.repeat_interleave(4, 0), R(500, 500))
add("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), R(16, 64, 32, 32))
add("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), R(16, 16, 64, 64))
add("channel_shuffle", lambda x: x.reshape(16, 4, 16, 32, 32).transpose(1, 2).reshape(16, 64, 32, 32) * 1.0, R(16, 64, 32, 32))
add("unfold 3x3", lambda x: F.unfold(x, 3, padding=1), R(16, 16, 28, 28))
add("unfold patches", lambda x: F.unfold(x, 8, stride=8), R(16, 3, 128, 128))
add("fold 3x3", lambda x: F.fold(x, (28, 28), 3, padding=1), R(16, 144, 784))
add("fold patches", lambda x: F.fold(x, (128, 128), 8, stride=8), R(16, 192, 256))
add("tensor.unfold", lambda x: x.unfold(1, 16, 8) * 1.0, R(64, 8000))
add("diagonal", lambda x: torch.diagonal(x, dim1=1, dim2=2) * 1.0, R(256, 64, 64))
add("meshgrid", lambda x, y: torch.stack(torch.meshgrid(x, y, indexing="ij")), R(700), R(700))

# ---- indexed ----

for table, many in [((30000, 256), 4096), ((1000, 64), 16384), ((100, 16), 65536), ((50000, 4), 50000), ((2, 768), 4096),
                    ((200000, 1), 100000)]:
    add("embedding", lambda i, w: F.embedding(i, w), I(table[0], many), R(*table))
add("embedding padding", lambda i, w: F.embedding(i, w, padding_idx=0), I(1000, 16384), R(1000, 64))
for mode in ("sum", "mean", "max"):
    module(f"EmbeddingBag {mode}", lambda m=mode: nn.EmbeddingBag(5000, 64, mode=m), I(5000, 1024, 16))
for axis, shape, many in [(0, (1000, 1000), 1000), (1, (1000, 1000), 1000), (1, (64, 197, 192), 98), (2, (64, 64, 256), 256)]:
    add(f"index_select {axis}", lambda x, i, a=axis: x.index_select(a, i), R(*shape), I(shape[axis], many))
for axis, shape in [(0, (1000, 1000)), (1, (1000, 1000)), (1, (64, 128, 64)), (2, (64, 64, 128)), (1, (200000, 5))]:
    add(f"gather {axis}", lambda x, i, a=axis: x.gather(a, i), R(*shape), I(shape[axis], *shape))
    add(f"scatter {axis}", lambda x, i, y, a=axis: x.scatter(a, i, y), R(*shape), I(shape[axis], *shape), R(*shape))
    add(f"scatter_add {axis}", lambda x, i, y, a=axis: x.scatter_add(a, i, y), R(*shape), I(shape[axis], *shape), R(*shape))
add("gather one of a row", lambda x, i: x.gather(1, i), R(100000, 32), I(32, 100000, 1))
add("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), R(1000, 1000), I(1000, 1000, 500))
add("scatter_reduce amax", lambda x, i, y: x.scatter_reduce(0, i, y, "amax"), R(1000, 1000), I(1000, 1000, 1000), R(1000, 1000))
add("index_add rows", lambda x, i, y: x.index_add(0, i, y), R(1000, 64), I(1000, 20000), R(20000, 64))
add("index_add rows, graph", lambda x, i: x.new_zeros(5000, 32).index_add(0, i, x), R(50000, 32), I(5000, 50000))
add("index_copy", lambda x, i, y: x.index_copy(0, torch.arange(500), y) * 1.0, R(1000, 1000), I(9, 1), R(500, 1000))
add("index rows", lambda x, i: x[i], R(5000, 128), I(5000, 10000))
add("index pairs", lambda x, i, j: x[i, j], R(1000, 1000), I(1000, 200000), I(1000, 200000))
add("index pairs of rows", lambda x, i, j: x[i, j], R(64, 128, 64), I(64, 10000), I(128, 10000))
add("index second axis", lambda x, i: x[:, i], R(1000, 500), I(500, 1000))
add("index_put accumulate", lambda x, i, y: x.index_put((i,), y, accumulate=True), R(1000, 256), I(1000, 4000), R(4000, 256))
add("index_put", lambda x, i, y: x.index_put((i,), y), R(4000, 256), I(4000, 1000), R(1000, 256))
add("assign slice", lambda x, y: torch.slice_scatter(x, y, 1, 100, 600), R(1000, 1000), R(1000, 500))
add("one_hot", lambda i: F.one_hot(i, 100).float(), I(100, 10000))
add("topk last", lambda x: x.topk(10, -1)[0], R(1000, 1000))
add("topk many", lambda x: x.topk(500, -1)[0], R(256, 1000))
add("topk first axis", lambda x: x.topk(10, 0)[0], R(1000, 256))
add("sort", lambda x: x.sort(-1)[0], R(256, 1000))
add("sort of few", lambda x: x.sort(-1)[0], R(20000, 16))
add("topk 2 of few", lambda x: x.topk(2, -1)[0], R(50000, 8))
add("sort", lambda x: x.sort(-1)[0], R(256, 1000))
add("sort long", lambda x: x.sort(-1)[0], R(2, 100000))
add("argsort", lambda x: x.argsort(-1), R(256, 1000))
add("bincount by one_hot", lambda i: F.one_hot(i, 50).sum(0), I(50, 20000))
add("searchsorted", lambda x: torch.bucketize(x, torch.linspace(-2, 2, 64)), N(1000, 100))

# ---- windows ----

for make, shape in [(lambda: nn.MaxPool2d(2), (32, 64, 56, 56)), (lambda: nn.MaxPool2d(3, 2, 1), (16, 64, 112, 112)),
                    (lambda: nn.MaxPool2d(3, 1, 1), (16, 64, 28, 28)), (lambda: nn.MaxPool2d(2), (64, 512, 4, 4)),
                    (lambda: nn.AvgPool2d(2), (32, 64, 56, 56)), (lambda: nn.AvgPool2d(3, 1, 1), (16, 64, 28, 28)),
                    (lambda: nn.AvgPool2d(7), (32, 512, 7, 7)), (lambda: nn.MaxPool1d(2), (64, 64, 1000)),
                    (lambda: nn.MaxPool1d(5, 1, 2), (64, 64, 250)), (lambda: nn.AvgPool1d(4), (64, 64, 1000)),
                    (lambda: nn.AvgPool1d(25, 1, 12), (32, 64, 300)), (lambda: nn.MaxPool3d(2), (8, 32, 16, 28, 28)),
                    (lambda: nn.MaxPool3d(3, 2, 1), (8, 32, 16, 28, 28)), (lambda: nn.AvgPool3d(2), (8, 32, 16, 28, 28)),
                    (lambda: nn.AdaptiveAvgPool2d(1), (32, 512, 14, 14)), (lambda: nn.AdaptiveAvgPool2d(7), (32, 128, 28, 28)),
                    (lambda: nn.AdaptiveAvgPool2d(5), (32, 128, 28, 28)), (lambda: nn.AdaptiveMaxPool2d(1), (32, 512, 14, 14)),
                    (lambda: nn.AdaptiveMaxPool2d(4), (32, 128, 28, 28)), (lambda: nn.AdaptiveAvgPool1d(8), (64, 128, 256)),
                    (lambda: nn.AdaptiveAvgPool3d(1), (8, 64, 8, 14, 14)), (lambda: nn.LPPool2d(2, 2), (32, 64, 28, 28))]:
    made = make()
    module(f"{type(made).__name__} {made.extra_repr()}".replace("kernel_size=", "").replace("output_size=", "")[:30], make, R(*shape))
for mode, dims in [("nearest", 1), ("linear", 1), ("nearest", 2), ("bilinear", 2), ("bicubic", 2), ("area", 2), ("nearest", 3),
                   ("trilinear", 3)]:
    shape = [(32, 64, 200), (8, 32, 32, 32), (4, 16, 8, 16, 16)][dims - 1]
    options = {"align_corners": True} if mode == "bilinear" else {}
    add(f"interpolate {mode} x2", lambda x, m=mode, o=options: F.interpolate(x, scale_factor=2, mode=m, **o), R(*shape))
    if dims == 2:
        add(f"interpolate {mode} to 45x37", lambda x, m=mode: F.interpolate(x, size=(45, 37), mode=m), R(*shape))
        add(f"interpolate {mode} to 14x14", lambda x, m=mode: F.interpolate(x, size=(14, 14), mode=m), R(16, 64, 32, 32))
add("interpolate antialias", lambda x: F.interpolate(x, size=(14, 14), mode="bilinear", antialias=True), R(8, 64, 32, 32))
for mode in ("bilinear", "nearest", "bicubic"):
    add(f"grid_sample {mode}", lambda x, g, m=mode: F.grid_sample(x, g * 1.6 - 0.8, mode=m, align_corners=False), R(8, 16, 32, 32), P(8, 32, 32, 2))
add("grid_sample 3d", lambda x, g: F.grid_sample(x, g * 1.6 - 0.8, align_corners=False), R(2, 8, 16, 16, 16), P(2, 16, 16, 16, 3))
add("affine_grid", lambda t: F.affine_grid(t, (64, 3, 64, 64), align_corners=False), R(64, 2, 3))

# ---- convolutions ----


def conv(name: str, shape: tuple[int, ...], out: int, kernel: Any, **options: Any) -> None:
    kind = f"{'ConvTranspose' if options.pop('transposed', False) else 'Conv'}{len(shape) - 2}d"
    module(f"{kind} {name} to {out}, {kernel}", lambda: getattr(nn, kind)(shape[1], out, kernel, **options), R(*shape))


conv("", (16, 64, 28, 28), 64, 3, padding=1)
conv("stem", (16, 3, 112, 112), 32, 7, stride=2, padding=3)
conv("patches", (16, 3, 224, 224), 192, 16, stride=16)
conv("1x1", (16, 128, 28, 28), 128, 1)
conv("1x1 strided", (16, 128, 28, 28), 128, 1, stride=2)
conv("small image", (32, 256, 4, 4), 256, 3, padding=1)
conv("one pixel", (256, 512, 1, 1), 512, 1)
conv("depthwise", (16, 128, 28, 28), 128, 3, padding=1, groups=128)
conv("depthwise strided", (16, 128, 56, 56), 128, 3, stride=2, padding=1, groups=128)
conv("depthwise", (16, 96, 28, 28), 96, 7, padding=3, groups=96)
conv("depthwise multiplied", (16, 32, 28, 28), 64, 3, padding=1, groups=32)
conv("depthwise", (16, 128, 28, 28), 128, 5, padding=2, groups=128)
conv("4 groups", (16, 64, 28, 28), 64, 3, padding=1, groups=4)
conv("32 groups", (16, 128, 28, 28), 128, 3, padding=1, groups=32)
conv("dilated", (16, 32, 28, 28), 32, 3, padding=2, dilation=2)
conv("1xk", (16, 32, 28, 28), 32, (1, 7), padding=(0, 3))
conv("kx1", (16, 32, 28, 28), 32, (7, 1), padding=(3, 0))
conv("one channel", (32, 1, 28, 28), 32, 5)
conv("to one channel", (16, 64, 56, 56), 1, 3, padding=1)
conv("odd channels", (16, 17, 28, 28), 19, 3, padding=1)
conv("reflect", (8, 32, 28, 28), 32, 3, padding=1, padding_mode="reflect")
conv("", (32, 64, 250), 64, 3, padding=1)
conv("dilated", (16, 64, 250), 64, 3, padding=8, dilation=8)
conv("strided", (16, 1, 16000), 64, 10, stride=5)
conv("depthwise", (32, 128, 250), 128, 9, padding=4, groups=128)
conv("depthwise causal", (16, 256, 128), 256, 4, padding=3, groups=256)
conv("1", (32, 256, 64), 256, 1)
conv("", (4, 16, 8, 28, 28), 16, 3, padding=1)
conv("depthwise", (4, 32, 8, 28, 28), 32, 3, padding=1, groups=32)
conv("(1, 3, 3)", (4, 16, 8, 28, 28), 16, (1, 3, 3), padding=(0, 1, 1))
conv("strided", (16, 64, 14, 14), 32, 4, stride=2, padding=1, transposed=True)
conv("2x2", (16, 64, 28, 28), 32, 2, stride=2, transposed=True)
conv("of one pixel", (64, 100, 1, 1), 128, 4, transposed=True)
conv("grouped", (16, 64, 14, 14), 64, 4, stride=2, padding=1, groups=4, transposed=True)
conv("depthwise", (16, 64, 14, 14), 64, 4, stride=2, padding=1, groups=64, transposed=True)
conv("", (16, 64, 125), 32, 4, stride=2, padding=1, transposed=True)
conv("", (4, 16, 4, 14, 14), 16, 2, stride=2, transposed=True)

# ---- products ----

for rows, inner, columns in [(512, 512, 512), (4096, 64, 64), (65536, 3, 64), (65536, 64, 3), (100000, 16, 1), (1, 4096, 4096),
                             (4, 4096, 1024), (8192, 8, 8), (32, 25088, 64), (256, 1000, 10), (4096, 33, 17), (20000, 40, 2)]:
    module("Linear", lambda i=inner, o=columns: nn.Linear(i, o), R(rows, inner))
    if (rows, inner, columns) not in [(512, 512, 512), (256, 1000, 10)]:
        add("matmul", torch.matmul, R(rows, inner), R(inner, columns))
module("Linear 3-D", lambda: nn.Linear(96, 384), R(8, 197, 96))
module("Linear 4-D", lambda: nn.Linear(32, 32), R(8, 28, 28, 32))
for left, right in [((4096,), (4096, 1024)), ((4096, 1024), (1024,)), ((1000000,), (1000000,)), ((64, 128, 64), (64, 64, 128)),
                    ((4096, 8, 8), (4096, 8, 8)), ((20000, 3, 3), (20000, 3, 3)), ((20000, 2, 2), (20000, 2, 2)),
                    ((20000, 1, 3), (20000, 3, 1)), ((20000, 4, 4), (20000, 4, 1)),
                    ((512, 1, 128), (512, 128, 64)), ((512, 64, 128), (512, 128, 1)), ((256, 49, 32), (256, 32, 49)),
                    ((16, 8, 64, 32), (16, 8, 32, 64)), ((16, 1, 64, 32), (16, 8, 32, 64)), ((64, 100, 64), (64, 64)),
                    ((100, 64), (64, 64, 64)), ((8, 1, 256, 64), (1, 8, 64, 256)), ((2000, 16, 5), (2000, 5, 16))]:
    add("matmul", torch.matmul, R(*left), R(*right))
add("matmul transposed", lambda x, y: x @ y.transpose(-1, -2), R(64, 128, 64), R(64, 128, 64))
add("matmul of columns", lambda x, y: x.transpose(-1, -2) @ y, R(64, 128, 64), R(64, 128, 64))
add("x.T @ x", lambda x: x.T @ x, R(8192, 64))
add("addmm", torch.addmm, R(512, 512), R(512, 256), R(256, 512))
add("baddbmm", torch.baddbmm, R(64, 64, 64), R(64, 64, 64), R(64, 64, 64))
add("outer", torch.outer, R(1000), R(1000))
module("Bilinear", lambda: nn.Bilinear(32, 32, 16), R(512, 32), R(512, 32))
EINSUMS = [("bij,bjk->bik", (64, 64, 64), (64, 64, 64)), ("bhqd,bhkd->bhqk", (8, 8, 64, 32), (8, 8, 64, 32)),
           ("bqhd,bkhd->bhqk", (8, 64, 8, 32), (8, 64, 8, 32)), ("bi,ij,bj->b", (512, 128), (128, 128), (512, 128)),
           ("nc,mc->nm", (512, 128), (512, 128)), ("bchw,c->bhw", (16, 64, 28, 28), (64,)), ("ij->ji", (1000, 1000)),
           ("bhwc,hkc->bhwk", (4, 14, 14, 64), (14, 14, 64)), ("bii->bi", (256, 64, 64)), ("i,j->ij", (1000,), (1000,)),
           ("bnd,bnd->bn", (64, 197, 192), (64, 197, 192)), ("ncvl,vw->ncwl", (16, 32, 20, 30), (20, 20)),
           ("nctkv,kvw->nctw", (8, 32, 30, 3, 25), (3, 25, 25))]
for equation, *operands in EINSUMS:
    add(f"einsum {equation}", lambda *xs, e=equation: torch.einsum(e, *xs), *[R(*shape) for shape in operands])
add("cdist", lambda x, y: torch.cdist(x, y), R(512, 64), R(512, 64))
add("cdist l1", lambda x, y: torch.cdist(x, y, p=1.0), R(256, 32), R(256, 32))
add("pairwise_distance", F.pairwise_distance, R(4096, 128), R(4096, 128))
add("cosine_similarity", F.cosine_similarity, R(4096, 128), R(4096, 128))
add("cosine_similarity dim 1", lambda x, y: F.cosine_similarity(x, y, dim=1), R(16, 64, 28, 28), R(16, 64, 28, 28))

# ---- attention and recurrence ----

for shape, causal in [((4, 8, 128, 64), False), ((4, 8, 128, 64), True), ((64, 4, 49, 32), False), ((256, 4, 16, 8), False),
                      ((2, 3, 197, 64), False), ((1, 4, 1024, 32), True), ((32, 8, 1, 64), False), ((8, 1, 64, 128), False)]:
    add(f"attention{' causal' * causal}", lambda q, k, v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c), *[R(*shape)] * 3)
add("attention mask", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), *[R(4, 8, 128, 64)] * 3, N(4, 1, 128, 128))
add("attention bias", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), *[R(64, 4, 49, 32)] * 3, R(1, 4, 49, 49))
add("attention cross", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), R(8, 8, 16, 64), R(8, 8, 256, 64), R(8, 8, 256, 64))
add("attention by hand", lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v, *[R(4, 8, 128, 64)] * 3)
add("attention key 16, value 32", lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v, R(32, 4, 196, 16), R(32, 4, 196, 16), R(32, 4, 196, 32))
module("MultiheadAttention", lambda: First(nn.MultiheadAttention(128, 4, batch_first=True)), *[R(16, 64, 128)] * 3)
for kind in ("LSTM", "GRU", "RNN"):
    module(kind, lambda k=kind: First(getattr(nn, k)(64, 128, batch_first=True)), R(32, 50, 64))
    module(f"{kind} small", lambda k=kind: First(getattr(nn, k)(16, 16)), R(100, 16, 16))
    module(f"{kind} one sequence", lambda k=kind: First(getattr(nn, k)(64, 64)), R(200, 1, 64))
module("LSTM 2 layers, both ways", lambda: First(nn.LSTM(32, 64, 2, bidirectional=True)), R(40, 32, 32))
module("LSTM wide", lambda: First(nn.LSTM(256, 512)), R(20, 32, 256))
module("GRU wide batch", lambda: First(nn.GRU(32, 32)), R(12, 1024, 32))
module("LSTMCell", lambda: First(nn.LSTMCell(256, 256)), R(256, 256))
module("GRUCell", lambda: nn.GRUCell(256, 256), R(256, 256))

# ---- losses ----

for shape in [(4096, 1000), (100000, 10), (200000, 2), (16, 21, 64, 64), (64, 100, 50), (8, 50000)]:
    target = I(shape[1], shape[0], *shape[2:])
    add("cross_entropy", F.cross_entropy, R(*shape), target)
    if shape[0] <= 4096:
        add("nll", lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), R(*shape), target)
add("nll alone", F.nll_loss, R(100000, 10), I(10, 100000))
add("cross_entropy smoothed", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), R(4096, 1000), I(1000, 4096))
add("cross_entropy weighted", lambda x, t, w: F.cross_entropy(x, t, w), R(16, 21, 64, 64), I(21, 16, 64, 64), N(21))
add("cross_entropy none", lambda x, t: F.cross_entropy(x, t, reduction="none"), R(4096, 200), I(200, 4096))
add("cross_entropy of probabilities", lambda x, t: F.cross_entropy(x, t.softmax(1)), R(4096, 200), N(4096, 200))
PAIRS = {"mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss,
         "bce_with_logits": F.binary_cross_entropy_with_logits, "soft_margin": F.soft_margin_loss, "poisson": F.poisson_nll_loss,
         "bce": lambda x, t: F.binary_cross_entropy(torch.sigmoid(x), t), "mse none": lambda x, t: F.mse_loss(x, t, reduction="none"),
         "kl_div": lambda x, t: F.kl_div(F.log_softmax(x, -1), t, reduction="batchmean"),
         "multilabel": F.multilabel_soft_margin_loss, "hinge": lambda x, t: F.hinge_embedding_loss(x, 2 * (t > 0.5) - 1.0),
         "gaussian_nll": lambda x, t: F.gaussian_nll_loss(x, t, torch.ones(1000, 1))}
for name, f in PAIRS.items():
    add(name, f, R(1000, 1000), N(1000, 1000))
add("bce_with_logits pos_weight", lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, pos_weight=w), R(20000, 50), N(20000, 50), N(50))
add("cosine_embedding", lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(4096)), R(4096, 128), R(4096, 128))
add("triplet", F.triplet_margin_loss, R(4096, 128), R(4096, 128), R(4096, 128))
add("margin_ranking", lambda x, y: F.margin_ranking_loss(x, y, torch.ones(1000000)), R(1000000), R(1000000))
add("multi_margin", F.multi_margin_loss, R(4096, 100), I(100, 4096))
add("ctc", lambda x, t: F.ctc_loss(F.log_softmax(x, -1), t + 1, torch.full((16,), 100), torch.full((16,), 20)), R(100, 16, 40), I(39, 16, 20))
add("info_nce", lambda x, y: F.cross_entropy(x @ y.T / 0.1, torch.arange(512)), R(512, 128), R(512, 128))

# ---- random ----

add("dropout", lambda x: F.dropout(x, 0.1), R(1000, 1000))
add("dropout2d", lambda x: F.dropout2d(x, 0.1), R(32, 64, 28, 28))
add("alpha_dropout", lambda x: F.alpha_dropout(x, 0.1, True), R(1000, 1000))
add("drop path", lambda x: x * (torch.rand(x.shape[0], 1, 1) > 0.1) / 0.9, R(64, 197, 96))
add("noise", lambda x: x + 0.1 * torch.randn_like(x), R(1000, 1000))
add("uniform noise", lambda x: x + 0.1 * torch.rand_like(x), R(1000, 1000))

# ---- whole formulas ----

add("rotary", lambda x, c, s: x * c + torch.cat([-x[..., 32:], x[..., :32]], -1) * s, R(4, 8, 128, 64), N(128, 64), N(128, 64))
add("squeeze and excite", lambda x, g: x * torch.sigmoid(g)[:, :, None, None], R(16, 64, 28, 28), R(16, 64))
add("layer scale", lambda x, g, y: x + g * y, R(64, 197, 96), R(96), R(64, 197, 96))
add("position features", lambda x: torch.cat([f(x[..., None] * 2.0**torch.arange(8) * math.pi) for f in (torch.sin, torch.cos)], -1), R(20000, 3))
add("window partition", lambda x: x.view(8, 4, 7, 4, 7, 96).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, 96) * 1.0, R(8, 28, 28, 96))
add("mean of masked tokens", lambda x, m: (x * m[..., None]).sum(1) / m.sum(1, keepdim=True), R(64, 128, 256), N(64, 128))
