"""Random modules: expressions of torch functions over a few tensors, for comparing ORTModule with eager where passes
meet.

    python tests/models/random_modules.py [--seed N] [--count 100] [--only SEED]

A module is made of its seed alone: parameters, arguments and a list of steps, each a function of tensors made before.
What is not used by a later step flows into the result, so that every step has a gradient.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import traceback
import warnings
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule

Tensor = torch.Tensor
LARGEST = 40000  # elements of a tensor


# ---- steps: each draws what it needs, and gives a function of the tensors it picked, or None where nothing fits ----


class Maker:
    """Draws one module: `tensors` are its values so far, by eager."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.parameters: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.used: set[int] = set()
        self.steps: list[tuple[str, Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = []

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.torch, dtype=torch.float64) * scale

    def parameter(self, *shape: int, scale: float = 0.5, shift: float = 0.0) -> int:
        """A new parameter, sometimes one that is there already: tied."""
        for i in range(len(self.parameters)) if self.rng.random() < 0.15 else ():
            if self.parameters[i].shape == shape:
                return i
        self.parameters.append(self.randn(*shape, scale=scale) + shift)
        return len(self.parameters) - 1

    def pick(self, fits: Callable[[Tensor], bool] = lambda t: True) -> int | None:
        """A tensor; rather a late one."""
        found = [i for i, t in enumerate(self.tensors) if fits(t)]
        if not found:
            return None
        return found[-1 - min(int(self.rng.expovariate(0.6)), len(found) - 1)]

    def add(self, name: str, f: Callable[..., Tensor], at: tuple[int, ...], parameters: tuple[int, ...] = ()) -> None:
        value = f(*(self.tensors[i] for i in at), *(self.parameters[i] for i in parameters))
        if (not value.numel() or value.numel() > LARGEST or not bool(value.isfinite().all())
            or float(value.abs().max()) > 50):
            return
        self.steps.append((name, f, at, parameters))
        self.used.update(at)
        self.tensors.append(value)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus, "elu": F.elu,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "square": torch.square, "neg": torch.neg, "exp": lambda x: (-x.abs()).exp(), "abs": torch.abs, "sin": torch.sin,
    "sqrt": lambda x: (x.abs() + 0.5).sqrt(), "log": lambda x: (x.abs() + 0.5).log(),
    "reciprocal": lambda x: 1 / (x.abs() + 1),
    "clamp": lambda x: x.clamp(-0.7, 0.9), "hardswish": F.hardswish, "mish": F.mish, "erf": torch.erf,
    "scaled": lambda x: x * 0.3, "shifted": lambda x: 1.5 - x, "power": lambda x: x**3 * 0.1,
    "where": lambda x: torch.where(x > 0.2, x, 0.5 * x),
    "masked": lambda x: x.masked_fill(x < -0.5, 0.25), "detached": lambda x: x * x.detach().sigmoid(),
    "rsqrt": lambda x: torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1) * x,
    "rounded": lambda x: x + x.detach().round(),
    "dropped": lambda x: F.dropout(x, 0.0), "half": lambda x: x.float().to(x.dtype) if x.dtype == torch.float32 else x,
}
REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x, d, k: x.sum(d, keepdim=k) * 0.3, "mean": lambda x, d, k: x.mean(d, keepdim=k),
    "amax": lambda x, d, k: x.amax(d, keepdim=k), "logsumexp": lambda x, d, k: x.logsumexp(d, keepdim=k),
    "norm": lambda x, d, k: (x.square().sum(d, keepdim=k) + 0.1).sqrt(),
    "var": lambda x, d, k: x.var(d, unbiased=False, keepdim=k),
    "prod": lambda x, d, k: (x.sigmoid() + 0.5).prod(d[0] if isinstance(d, tuple) else d, keepdim=k),
    "min": lambda x, d, k: x.amin(d, keepdim=k),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": lambda a, b: a / (b.abs() + 1),
    "maximum": torch.maximum, "pick": lambda a, b: torch.where(a > b, a, b * 0.5),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3), "gate": lambda a, b: F.silu(a) * b,
}


def unary(m: Maker) -> None:
    name = m.rng.choice(list(UNARY))
    m.add(name, UNARY[name], (m.pick(),))


def broadcastable(a: Tensor, b: Tensor) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a.shape), reversed(b.shape)))


def binary(m: Maker) -> None:
    a = m.pick()
    b = m.pick(lambda t: broadcastable(t, m.tensors[a]))
    name = m.rng.choice(list(BINARY))
    m.add(name, BINARY[name], (a, b) if m.rng.random() < 0.5 else (b, a))


def with_parameter(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() > 0)
    shape = [1 if m.rng.random() < 0.3 else n for n in m.tensors[a].shape]
    shape = shape[m.rng.randrange(len(shape)):]
    name = m.rng.choice(list(BINARY))
    m.add(f"{name} of a parameter", BINARY[name], (a,), (m.parameter(*shape),))


def linear(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() > 0)
    wide, out = m.tensors[a].shape[-1], m.rng.choice((1, 3, 5, 8, 16, 24))
    weight = m.parameter(out, wide, scale=wide**-0.5)
    if m.rng.random() < 0.6:
        m.add("linear", lambda x, w, b: F.linear(x, w, b), (a,), (weight, m.parameter(out)))
    elif m.rng.random() < 0.5:
        m.add("linear without bias", F.linear, (a,), (weight,))
    else:
        m.add("product", lambda x, w, b: x @ w.t() * 0.7 + b, (a,), (weight, m.parameter(1)))


def matmul(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() >= 2)
    if a is None:
        return
    x = m.tensors[a]
    kind = m.rng.randrange(4)
    if kind == 0:
        m.add("gram", lambda x: x @ x.mT * x.shape[-1] ** -0.5, (a,))
    elif kind == 1:
        m.add("gram transposed", lambda x: x.mT @ x * x.shape[-2] ** -0.5, (a,))
    else:
        fits = (lambda t: t.dim() >= 2 and t.shape[-2] == x.shape[-1]
                and t.shape[:-2] == x.shape[:-2]) if kind == 2 else (
lambda t: t.dim() >= 2 and t.shape[-1] == x.shape[-1] and broadcastable(t[..., 0, 0], x[..., 0, 0]))
        b = m.pick(fits)
        if b is not None:
            scale = x.shape[-1] ** -0.5
            m.add("matmul", (lambda x, y: x @ y * scale) if kind == 2
                  else (lambda x, y: scale * (x @ y.transpose(-1, -2))), (a, b))


def reshape(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() > 0)
    shape = list(m.tensors[a].shape)
    kind = m.rng.randrange(8)
    d, e = m.rng.randrange(len(shape)), m.rng.randrange(len(shape))
    if kind == 0:
        m.add("transpose", lambda x: x.transpose(d, e), (a,))
    elif kind == 1:
        order = m.rng.sample(range(len(shape)), len(shape))
        m.add("permute", lambda x: x.permute(order), (a,))
    elif kind == 2 and len(shape) > 1:
        m.add("flatten", lambda x: x.flatten(min(d, e), max(d, e)), (a,))
    elif kind == 3 and len(shape) < 5:
        parts = [n for n in (2, 3, 4) if shape[d] % n == 0]
        if parts:
            n = m.rng.choice(parts)
            m.add("split in two", lambda x: x.unflatten(d, (n, -1)), (a,))
    elif kind == 4 and len(shape) < 5:
        m.add("unsqueeze", lambda x: x.unsqueeze(d), (a,))
    elif kind == 5:
        n = shape[d]
        m.add("expand", lambda x: x.narrow(d, 0, 1).expand([n if i == d else -1 for i in range(x.dim())]), (a,))
    elif kind == 6:
        m.add("flip", lambda x: x.flip(d), (a,))
    else:
        m.add("roll", lambda x: x.roll(1, d), (a,))


def part(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() > 0)
    shape = m.tensors[a].shape
    d = m.rng.randrange(len(shape))
    n, kind = shape[d], m.rng.randrange(8)
    if kind == 0 and n > 1:
        first = m.rng.randrange(n - 1)
        m.add("slice", lambda x: x.narrow(d, first, n - first), (a,))
    elif kind == 1 and n > 2:
        m.add("stepped", lambda x: x.index_select(d, torch.arange(0, n, 2, device=x.device)), (a,))
    elif kind == 2:
        index = torch.tensor([m.rng.randrange(n) for _ in range(m.rng.randint(1, 6))])
        m.add("index_select", lambda x: x.index_select(d, index), (a,))
    elif kind == 3:
        b = m.pick(lambda t: t.dim() == len(shape) and all(x == y for i, (x, y) in enumerate(zip(t.shape, shape))
                                                           if i != d))
        m.add("cat", lambda x, y: torch.cat([x, y, x], d), (a, b))
    elif kind == 4 and n % 2 == 0:
        m.add("chunks", lambda x: x.chunk(2, d)[0] * x.chunk(2, d)[1].tanh(), (a,))
    elif kind == 5 and n % 3 == 0:
        def thirds(x: Tensor) -> Tensor:
            q, k, v = x.split(n // 3, d)
            return q * k.sigmoid() + v
        m.add("thirds", thirds, (a,))
    elif kind == 6:
        pads = [0, 0] * (len(shape) - 1 - d) + [1, m.rng.randint(0, 2)]
        m.add("pad", lambda x: F.pad(x, pads, value=0.5), (a,))
    elif kind == 7:
        m.add("halves rotated", lambda x: torch.cat((-x.narrow(d, n // 2, n - n // 2), x.narrow(d, 0, n // 2)), d),
              (a,))


def reduce(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() > 0)
    rank = m.tensors[a].dim()
    dims = tuple(m.rng.sample(range(rank), m.rng.randint(1, min(2, rank))))
    keep, name = m.rng.random() < 0.6, m.rng.choice(list(REDUCE))
    if keep and m.rng.random() < 0.5:
        m.add(f"{name} and back", lambda x: x - REDUCE[name](x, dims, True), (a,))
    else:
        m.add(name, lambda x: REDUCE[name](x, dims, keep), (a,))


def norm(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() > 1 and t.shape[-1] > 1)
    if a is None:
        return
    wide = m.tensors[a].shape[-1]
    weight, bias, kind = m.parameter(wide, scale=0.2, shift=1.0), m.parameter(wide), m.rng.randrange(5)
    if kind == 0:
        m.add("layer_norm", lambda x, w, b: F.layer_norm(x, (wide,), w, b, 1e-3), (a,), (weight, bias))
    elif kind == 1:
        m.add("rms_norm", lambda x, w: F.rms_norm(x, (wide,), w, 1e-3), (a,), (weight,))
    elif kind == 2:
        b = m.pick(lambda t: t.shape == m.tensors[a].shape)
        m.add("residual layer_norm", lambda x, y, w, b: F.layer_norm(x + F.dropout(y, 0.0), (wide,), w, b, 1e-3),
              (a, b), (weight, bias))
    elif kind == 3:
        m.add("softmax", lambda x: x.softmax(-1), (a,))
    else:
        d = m.rng.randrange(m.tensors[a].dim())
        m.add("log_softmax", lambda x: x.log_softmax(d), (a,))


def attention(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() == 3)
    if a is None:
        return
    batch, length, wide = m.tensors[a].shape
    heads, each = m.rng.choice((1, 2, 3)), m.rng.choice((4, 8))
    causal, kind, scores = m.rng.random() < 0.5, m.rng.randrange(3), m.rng.random() < 0.5
    qkv = m.parameter(3 * heads * each, wide, scale=wide**-0.5)
    mask = torch.ones(length, length, dtype=torch.bool).tril()

    def attend(x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        y = F.linear(x, w, *bias)
        if kind == 0:
            q, k, v = (t.view(batch, length, heads, each).transpose(1, 2) for t in y.split(heads * each, -1))
        elif kind == 1:
            q, k, v = y.view(batch, length, 3, heads, each).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = y.view(batch, length, heads, 3 * each).transpose(1, 2).chunk(3, -1)
        if not scores:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            s = q @ k.transpose(-1, -2) / each**0.5
            if causal:
                s = s.masked_fill(~mask, -1e9)
            out = F.dropout(s.softmax(-1), 0.0) @ v
        return out.transpose(1, 2).reshape(batch, length, heads * each)

    m.add(f"attention {kind}", attend, (a,), (qkv, m.parameter(3 * heads * each)) if m.rng.random() < 0.5 else (qkv,))


def image(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() == 4 and min(t.shape[2:]) > 2)
    if a is None:
        return
    channels = m.tensors[a].shape[1]
    kind = m.rng.randrange(7)
    if kind < 2:
        out, size, stride, pad = map(m.rng.choice, ((2, 4, 6), (1, 2, 3), (1, 1, 2), (0, 1)))
        weight = m.parameter(out, channels, size, size, scale=(channels * size * size) ** -0.5)
        bias = (m.parameter(out),) if kind else ()
        m.add("conv2d", lambda x, w, *b: F.conv2d(x, w, *(b or (None,)), stride, pad), (a,), (weight, *bias))
    elif kind == 2:
        weight, bias = m.parameter(channels, shift=1.0), m.parameter(channels)
        activated = m.rng.random() < 0.6
        f = F.relu if activated else (lambda x: x)
        m.add("batch_norm", lambda x, w, b: f(F.batch_norm(x, None, None, w, b, True, 0.1, 1e-3)), (a,), (weight, bias))
    elif kind == 3:
        m.add("max_pool", lambda x: F.max_pool2d(x, 2), (a,))
    elif kind == 4:
        m.add("avg_pool", lambda x: F.avg_pool2d(x, 3, 2, 1), (a,))
    elif kind == 5:
        m.add("interpolate", lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), (a,))
    else:
        weight = m.parameter(channels, 1, 3, 3, scale=0.3)
        m.add("depthwise", lambda x, w: F.conv2d(x, w, None, 1, 1, groups=channels), (a,), (weight,))


def gather(m: Maker) -> None:
    a = m.pick(lambda t: t.dim() > 0)
    shape = m.tensors[a].shape
    d, kind = m.rng.randrange(len(shape)), m.rng.randrange(5)
    if kind == 0:
        index = torch.randint(0, shape[d], tuple(shape), generator=m.torch)
        m.add("gather", lambda x: x.gather(d, index), (a,))
    elif kind == 1:
        index = torch.randint(0, shape[d], tuple(shape), generator=m.torch)
        m.add("scatter_add", lambda x: torch.zeros_like(x).scatter_add(d, index, x), (a,))
    elif kind == 2:
        words = torch.randint(0, 7, tuple(shape[:2]), generator=m.torch)
        m.add("embedding", lambda x, w: F.embedding(words, w) + x.mean(), (a,), (m.parameter(7, m.rng.choice((3, 8))),))
    elif kind == 3:
        m.add("cumsum", lambda x: x.cumsum(d) * 0.3, (a,))
    else:
        m.add("sorted", lambda x: x.topk(min(3, shape[d]), d)[0], (a,))


KINDS = {unary: 6, binary: 6, with_parameter: 3, linear: 5, matmul: 3, reshape: 5, part: 4, reduce: 3, norm: 4,
         attention: 2, image: 4, gather: 2}
SHAPES = [(4,), (3, 8), (6, 6), (2, 5, 8), (4, 3, 12), (2, 4, 6, 6), (1, 3, 9, 8), (2, 2, 3, 4)]


class RandomModule(nn.Module):
    """The module of a seed. Its arguments are `arguments`, float64."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        m = Maker(seed)
        shape = m.rng.choice(SHAPES)
        for _ in range(m.rng.randint(1, 3)):
            m.tensors.append(m.randn(*(shape if m.rng.random() < 0.6 else m.rng.choice(SHAPES))))
        self.arguments = list(m.tensors)
        length, kinds = m.rng.randint(3, 18), list(KINDS)
        for _ in range(10 * length):
            if len(m.steps) < length:
                m.rng.choices(kinds, list(KINDS.values()))[0](m)
        self.steps = m.steps
        self.weights = nn.ParameterList(m.parameters)
        self.loose = [i for i in range(len(m.tensors)) if i not in m.used]
        self.scalar = m.rng.random() < 0.5

    def forward(self, *arguments: Tensor) -> Tensor | tuple[Tensor, ...]:
        tensors, weights = list(arguments), list(self.weights)
        for _, f, at, parameters in self.steps:
            tensors.append(f(*(tensors[i] for i in at), *(weights[i] for i in parameters)))
        if self.scalar:
            return sum((i + 1) * tensors[t].square().mean() for i, t in enumerate(self.loose))
        return tuple(tensors[t] for t in self.loose if t >= len(arguments)) or tensors[-1] * 1.0

    def text(self) -> str:
        count = len(self.arguments)
        lines = [f"  t{i} = argument {tuple(a.shape)}" for i, a in enumerate(self.arguments)]
        lines += [f"  t{count + i} = {name}({', '.join(f't{a}' for a in at)}; {', '.join(f'w{p}' for p in parameters)})"
                  for i, (name, _, at, parameters) in enumerate(self.steps)]
        return "\n".join([*lines, f"  results {self.loose}{', in one scalar' if self.scalar else ''}"])


# ---- comparison ----

DRAWS = 8


def distance(a: Tensor, exact: Tensor) -> float:
    """The largest difference of two elements."""
    return float((a.double() - exact).abs().max())


def train(model: nn.Module, given: list[Tensor], dtype: torch.dtype, steps: int) -> list[Tensor]:
    """Results and every gradient of steps of plain gradient descent; each step's arguments are its own."""
    seen = []
    for step in range(steps):
        arguments = [(a.roll(step, 0) * (1 + 0.1 * step)).to(dtype).requires_grad_(True) for a in given]
        results = model(*arguments)
        results = [results] if isinstance(results, Tensor) else list(results)
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = None
        loss = sum((r * torch.randn(r.shape, generator=generator, dtype=torch.float64).to(dtype)).sum()
                   for r in results)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return [r.detach() for r in results]
        loss.backward()
        seen += [r.detach().clone() for r in results]
        seen += [torch.zeros(()) if t.grad is None else t.grad.clone() for t in [*arguments, *model.parameters()]]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 1e-3 * p.grad.clamp(-1, 1)
    return seen


def shaken(module: RandomModule, dtype: torch.dtype, steps: int, seed: int) -> list[Tensor]:
    """train() by eager, of the module with numbers that are a rounding of `dtype` larger or smaller, or as they are."""
    generator, eps = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps

    def shake(x: Tensor) -> Tensor:
        return x * (1 + eps * torch.randint(-1, 2, x.shape, generator=generator, dtype=torch.float64))

    model = copy.deepcopy(module)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(shake(p))
    return train(model.to(dtype), [shake(a) for a in module.arguments], dtype, steps)


def compare(seed: int, steps: int = 2) -> str | None:
    """What differs between eager and ours for the module of a seed, or None.

    A tensor may be off by eight times what eager is. That is one draw, and a sum that cancels may come out exactly, so
    where more is off the most of a few draws counts: eager's, with numbers of a rounding's difference.
    """
    module = RandomModule(seed)
    exact = train(copy.deepcopy(module), module.arguments, torch.float64, steps)
    for dtype, least in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        eager = exact
        if dtype != torch.float64:
            eager = train(copy.deepcopy(module).to(dtype), module.arguments, dtype, steps)
        wrapped = ORTModule(copy.deepcopy(module).to(dtype))
        ours = train(wrapped, module.arguments, dtype, steps)
        counts = onnxtrain.stats(wrapped)
        if counts["fallback_steps"]:
            return f"{dtype}: fell back: {counts['reasons']}"
        if len(ours) != len(exact):
            return f"{dtype}: {len(ours)} tensors, expected {len(exact)}"
        draws: list[list[Tensor]] = [eager]
        for i, (a, e, x) in enumerate(zip(ours, eager, exact, strict=True)):
            if a.shape != e.shape or a.dtype != e.dtype:
                return f"{dtype}: tensor {i} is {a.dtype} {tuple(a.shape)}, expected {e.dtype} {tuple(e.shape)}"
            if not x.numel():
                continue
            size = float(x.abs().max()) + 0.05  # the terms of a sum that cancels are of order 1
            off, own = distance(a, x) / size, distance(e, x) / size
            if off > max(least, 8 * own) and len(draws) == 1:
                draws += [shaken(module, dtype, steps, draw) for draw in range(DRAWS)]
            own = max(distance(draw[i], x) / size for draw in draws)
            if not off <= max(least, 8 * own):
                return f"{dtype}: tensor {i} of {len(ours)} is off by {off:.1e} of its largest; eager by {own:.1e}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    seeds = [args.only] if args.only is not None else range(args.seed, args.seed + args.count)
    failures = 0
    for seed in seeds:
        try:
            difference = compare(seed)
        except Exception:  # noqa: BLE001  reported below with its module
            difference = traceback.format_exc(limit=-4)
        if difference or args.only is not None:
            print(f"seed {seed}: {difference}\n{RandomModule(seed).text()}", flush=True)
        failures += difference is not None
    print(f"{len(seeds)} modules, {failures} differ (seed {args.seed})")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
