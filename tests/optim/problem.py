"""Random problems for optimizers, and plain torch formulas of the rules that torch.optim does not have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SHAPES = ((37, 19), (), (3, 4, 5, 2), (2049,))


def make_params(seed: int = 0, dtype: torch.dtype = torch.float64, shapes: Iterable[tuple[int, ...]] = SHAPES) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
            for shape in shapes]


@functools.lru_cache(maxsize=4)
def noise(shapes: tuple[tuple[int, ...], ...], seed: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((steps, *shape), generator=generator, dtype=torch.float64) for shape in shapes]


class Problem:
    """Noisy gradients of a quadratic with its own curvature for every element; equal for equal seeds."""

    def __init__(self, params: list, seed: int = 1, steps: int = 200) -> None:
        drawn = noise(tuple(tuple(p.shape) for p in params), seed, steps + 2)
        self.targets = [d[0] for d in drawn]
        self.curvature = [d[1].exp() for d in drawn]
        self.noise = [0.3 * d[2:] for d in drawn]
        self.params, self.step = params, 0

    def set_grads(self, dtype: torch.dtype | None = None) -> None:
        for p, target, curvature, added in zip(self.params, self.targets, self.curvature, self.noise):
            g = torch.addcmul(added[self.step], curvature, p.detach().double() - target)
            p.grad = None
            p.grad_dtype = dtype or p.dtype
            p.grad = g.to(dtype or p.dtype)
        self.step += 1


def trajectory(make: Callable[[list], torch.optim.Optimizer], dtype: torch.dtype, steps: int = 200,
               every_step: Callable[[torch.optim.Optimizer, int], None] | None = None) -> list[Tensor]:
    """The parameters after `steps` steps of the optimizer that `make` makes for them."""
    params = make_params(dtype=dtype)
    problem, optimizer = Problem(params, steps=steps), make(params)
    for i in range(steps):
        problem.set_grads()
        if every_step:
            every_step(optimizer, i)
        optimizer.step()
    return [p.detach().clone() for p in params]


class Reference(torch.optim.Optimizer):
    """A rule as plain torch, one tensor at a time, with weight decay and learning rate per group."""

    def __init__(self, params: Iterable, rule: Callable[..., Tensor], **options) -> None:
        self.rule = rule
        super().__init__(params, options)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["t"] = state.get("t", 0) + 1
                g = -p.grad if group.get("maximize") else p.grad
                p.copy_(self.rule(p.clone(), g, state, group))


def moments(g: Tensor, s: dict, betas: tuple[float, float], correct: bool) -> tuple[Tensor, Tensor, float, float]:
    b1, b2 = betas
    s["m"] = b1 * s.get("m", torch.zeros_like(g)) + (1 - b1) * g
    s["v"] = b2 * s.get("v", torch.zeros_like(g)) + (1 - b2) * g * g
    return s["m"], s["v"], 1 - b1 ** s["t"] if correct else 1.0, 1 - b2 ** s["t"] if correct else 1.0


def adam(p: Tensor, g: Tensor, s: dict, o: dict) -> Tensor:
    """Modes 0, 1, 2 as onnxruntime-training defines them."""
    lr, wd, mode = o["lr"], o["weight_decay"], o["mode"]
    if mode == 0:
        g = g + wd * p
    m, v, c1, c2 = moments(g, s, o["betas"], o["bias_correction"])
    if mode == 2:
        p = p - lr * wd * p
        return p - lr * m / (c1 * (v.sqrt() / math.sqrt(c2) + o["eps"]))
    p = p - lr * math.sqrt(c2) / c1 * m / (v.sqrt() + o["eps"])
    return p - lr * wd * p if mode == 1 else p


def lamb(p: Tensor, g: Tensor, s: dict, o: dict) -> Tensor:
    m, v, c1, c2 = moments(g, s, o["betas"], o["bias_correction"])
    u = m / c1 / ((v / c2).sqrt() + o["eps"]) + o["weight_decay"] * p
    pn, un = p.norm().item(), u.norm().item()
    ratio = min(max(pn / un, o.get("ratio_min", 0.0)), o.get("ratio_max", math.inf)) if pn and un else 1.0
    return p - o["lr"] * ratio * u


def lion(p: Tensor, g: Tensor, s: dict, o: dict) -> Tensor:
    b1, b2 = o["betas"]
    m = s.get("m", torch.zeros_like(g))
    p = p - o["lr"] * o["weight_decay"] * p
    s["m"] = b2 * m + (1 - b2) * g
    return p - o["lr"] * torch.sign(b1 * m + (1 - b1) * g)
