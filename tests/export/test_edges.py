"""Values and gradients where formulas break: signed zeros, infinities, NaN, ties, integers and mixed dtypes.

Many functions share a module, each with an input of its own, so that one export is for all of them.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn, tensor

import onnxtrain
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule

INF, NAN = math.inf, math.nan
VALUES = tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-6, INF, -INF, NAN])
FINITE = tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-6])
FIRST, SECOND = FINITE.repeat_interleave(len(FINITE)), FINITE.repeat(len(FINITE))
TIES = tensor([[1.0, 1.0, 0.0], [2.0, -0.0, 0.0], [-1.0, -1.0, -1.0]])


class Functions(nn.Module):
    """Each function of inputs of its own."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, inputs):
        return [function(*own) for function, own in zip(self.functions, inputs)]


def step(model, inputs):
    leaves = [[x.clone().requires_grad_(x.is_floating_point()) for x in own] for own in inputs]
    results = model(leaves)
    terms = [(y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum() for y in results
             if y.requires_grad]
    if terms:
        torch.stack([t.double() for t in terms]).sum().backward()
    return results, [[x.grad for x in own] for own in leaves]


def agree(table, inputs, gradients=True):
    """The functions of a table by name, each on copies of `inputs`."""
    functions, given = list(table.values()), [inputs] * len(table)
    model = ORTModule(Functions(functions), DebugOptions(log_level=LogLevel.ERROR))
    want, want_grads = step(Functions(functions), given)
    got, got_grads = step(model, given)
    wrong = []
    for name, w, g, w_grads, g_grads in zip(table, want, got, want_grads, got_grads, strict=True):
        if (w.dtype, w.shape, w.requires_grad) != (g.dtype, g.shape, g.requires_grad):
            wrong.append(f"{name}: {g.dtype} {tuple(g.shape)} {g.requires_grad}")
            continue
        pairs = [("value", w.detach(), g.detach())]
        if gradients:
            pairs += [(f"gradient {i}", a, b) for i, (a, b) in enumerate(zip(w_grads, g_grads, strict=True))]
        for what, a, b in pairs:
            if a is None or b is None:
                wrong += [f"{name}: {what} {b} for {a}"] * (a is not b)
            elif not torch.allclose(b.double(), a.double(), rtol=1e-5, atol=1e-7, equal_nan=True):
                wrong.append(f"{name}: {what} {b.tolist()} for {a.tolist()}")
    assert not wrong, "\n".join(wrong)
    assert onnxtrain.stats(model)["engine_steps"] == 1, onnxtrain.stats(model)["reasons"]


UNARY = {
    "abs": torch.abs, "neg": torch.neg, "sign": torch.sign, "round": torch.round, "floor": torch.floor,
    "ceil": torch.ceil, "trunc": torch.trunc, "angle": torch.angle, "hardtanh": F.hardtanh, "relu6": F.relu6,
    "elu": F.elu,
    "selu": F.selu, "celu": F.celu, "logsigmoid": F.logsigmoid, "log1p": torch.log1p, "expm1": torch.expm1,
    "erfinv": torch.erfinv, "square": torch.square, "reciprocal": torch.reciprocal, "isnan": torch.isnan,
    "isinf": torch.isinf, "signbit": torch.signbit, "one over abs": lambda x: 1 / x.abs(),
    "one over neg": lambda x: 1 / -x,
    "nan_to_num": torch.nan_to_num, "clamp": lambda x: x.clamp(-1, 1), "clamp_max": lambda x: x.clamp(max=1),
    "clamp by NaN": lambda x: x.clamp(NAN, 1.0), "clamp nothing": lambda x: x.clamp(1, -1),
}


def test_unary():
    agree(UNARY, [VALUES])


def test_unary_values():
    """Eager's slopes at poles are not numbers in some of these."""
    agree({"lgamma": torch.lgamma, "digamma": torch.digamma, "softplus": F.softplus, "sinc": torch.sinc,
           "logit": lambda x: torch.logit(x, 0.1)}, [VALUES], gradients=False)


def test_ends_of_the_interval():
    agree({"logit": torch.logit, "logit within": lambda x: torch.logit(x, 0.1), "entr": torch.special.entr},
          [tensor([0.0, 1e-6, 0.1, 0.5, 0.9, 1.0])])


BINARY = {
    "maximum": torch.maximum, "minimum": torch.minimum, "fmax": torch.fmax, "fmin": torch.fmin, "atan2": torch.atan2,
    "hypot": torch.hypot, "copysign": torch.copysign, "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
    "where": lambda a, b: torch.where(a > b, a, b), "distance": lambda a, b: (a - b).abs(),
    "floor": lambda a, b: torch.div(a, b.abs() + 0.1, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b.abs() + 0.1, rounding_mode="trunc"),
    "remainder": lambda a, b: torch.remainder(a, b.abs() + 0.1), "fmod": lambda a, b: torch.fmod(a, b.abs() + 0.1),
}


def test_binary():
    agree(BINARY, [FIRST, SECOND])


def test_slopes_beside_infinity():
    """Of an infinite or missing number on either side of what has a bend."""
    a, b = VALUES.repeat_interleave(len(VALUES)), VALUES.repeat(len(VALUES))
    agree({"clamp": lambda a, b: a.clamp(b, b + 1), "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
           "huber": lambda a, b: F.huber_loss(a, b, reduction="none", delta=0.5),
           "smooth_l1": lambda a, b: F.smooth_l1_loss(a, b, reduction="none", beta=0.5)}, [a, b])
    agree({"clamp": torch.clamp}, [FINITE, FINITE.flip(0), FINITE.flip(0) * 0.5])
    agree({"smooth_l1": lambda a, b: F.smooth_l1_loss(a, b, reduction="sum"), "huber": F.huber_loss},
          [FIRST.bfloat16(), SECOND.bfloat16()])


def test_repeats_made_of_sizes():
    class Repeated(nn.Module):
        def forward(self, x, n):
            times = int(n.sum())
            return (x.repeat_interleave(len(n)), x.repeat_interleave(len(n), -1), x.repeat_interleave(times, 0),
                    x.sum().repeat_interleave(times), x[:, :0].repeat_interleave(times, 0))

    model = ORTModule(Repeated(), DebugOptions(log_level=LogLevel.ERROR))
    for n in ([2, 0], [2], [1, 1, 1], [0, 0]):
        given, expected = TIES.clone().requires_grad_(), TIES.clone().requires_grad_()
        got, want = model(given, tensor(n)), Repeated()(expected, tensor(n))
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours, theirs) and ours.shape == theirs.shape
        (got[1].square().sum() + got[2].sum()).backward()
        (want[1].square().sum() + want[2].sum()).backward()
        assert torch.equal(given.grad, expected.grad)
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_infinite_operands():
    a, b = VALUES.repeat_interleave(len(VALUES)), VALUES.repeat(len(VALUES))
    agree({"hypot": torch.hypot, "atan2": torch.atan2, "xlogy": torch.xlogy, "copysign": torch.copysign,
           "fmax": torch.fmax, "maximum": torch.maximum, "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
           "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"), "remainder": torch.remainder,
           "logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2, "xlog1py": torch.special.xlog1py,
           "prelu": lambda a, b: F.prelu(a.view(1, -1), b)}, [a, b], gradients=False)
    numbers = VALUES[:-1]
    a, b = numbers.repeat_interleave(len(numbers)), numbers.repeat(len(numbers))
    agree({"sign of atan2": lambda a, b: torch.signbit(torch.atan2(a, b))}, [a, b])


REDUCED = {
    "max": torch.max, "min": torch.min, "max_dim": lambda x: x.max(1)[0], "min_dim": lambda x: x.min(1)[0],
    "amax": lambda x: x.amax(1), "amin": lambda x: x.amin(0), "topk": lambda x: x.topk(2)[0],
    "sort": lambda x: x.sort(stable=True)[0], "median": lambda x: x.median(1)[0], "cummax": lambda x: x.cummax(1)[0],
    "norm": lambda x: (x * 0).norm(), "norm_inf": lambda x: x.norm(INF, dim=1), "prod": lambda x: x.prod(1),
    "max_pool": lambda x: F.max_pool1d(x.unsqueeze(0), 2, 1), "relu": F.relu, "clamp": lambda x: x.clamp(-1, 1),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x.unsqueeze(0), 1),
    "one cell of a row": lambda x: F.adaptive_max_pool1d(x.unsqueeze(1), 1),
    "one cell of three dims": lambda x: F.adaptive_max_pool3d(x.repeat(2, 2, 1, 1), 1, return_indices=True)[0],
    "where": lambda x: F.adaptive_max_pool2d(x.repeat(2, 1, 2).unsqueeze(1), 1, return_indices=True)[1],
    "argmax": lambda x: x.argmax(1), "argmin": lambda x: x.argmin(1),
    "argsort": lambda x: x.argsort(stable=True, dim=1), "power 0": lambda x: torch.linalg.matrix_power(x, 0),
    "powers 0": lambda x: torch.stack([x, x]).matrix_power(0),
}


def test_ties():
    agree(REDUCED, [TIES])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ties_among_many(dtype):
    """Which of equals topk takes hangs on its algorithm: routes of a mixture of experts in 16 bits."""
    x = (torch.arange(1320) ** 2 % 7).view(4, 330).to(dtype)
    x[0, ::50] = NAN
    agree({f"{k} {largest} {ordered} {part} {dim}": lambda x, k=k, largest=largest, ordered=ordered, part=part, dim=dim:
           x[..., :48].topk(k, dim, largest, ordered)[part]
           for k, dim, largest, ordered in ((1, 1, True, True), (2, 0, False, True), (10, 1, True, True),
                                            (20, 1, False, True), (20, 1, True, False), (48, 1, True, True))
           for part in (0, 1)}, [x])
    agree({f"{k} of many": lambda x, k=k: x.topk(k)[0] for k in (1, 5, 6, 300)} | {
        "of one": lambda x: x[1, 0].topk(1)[0], "where": lambda x: x.topk(3)[1]}, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_of_numbers_that_are_none(dtype):
    x = tensor([NAN, 0.25, -3.0, 3.0, 0.0]).to(dtype)
    agree({"softshrink": F.softshrink, "logit": lambda x: torch.logit(x, 1e-3),
           "norm 0": lambda x: x.detach().norm(0) + x.detach()[1:].norm(0, dim=0)}, [x])
    agree({"entr": torch.special.entr}, [tensor([INF, 0.5, 2.0, 0.0, -1.0, NAN]).to(dtype)])
    agree({"heaviside": lambda x, y: torch.heaviside(x.detach(), y.detach())}, [x, x.flip(0)])


def test_a_number_read_from_float64():
    def scaled(x):
        return x * (x.detach().sum() / 3).item()

    x = tensor([0.1, 0.7], dtype=torch.float64)
    model = ORTModule(Functions([scaled]), DebugOptions(log_level=LogLevel.ERROR))
    torch.testing.assert_close(model([[x]])[0], scaled(x), rtol=1e-15, atol=0)
    assert onnxtrain.stats(model)["engine_steps"] == 1


def test_ends_have_no_gradient():
    agree({"linspace": lambda x: torch.linspace(x[0], x[-1], 5) * x[1],
           "logspace": lambda x: torch.logspace(x[3], end=x[2], steps=5) * x[4]}, [FINITE])


def test_functions_that_torch_runs():
    """erfcx and log_ndtr by ONNX's Erf have no digit left where it is one."""
    agree({"erfcx": torch.special.erfcx, "log_ndtr": torch.special.log_ndtr}, [torch.linspace(-12, 9, 22)])


def test_logsigmoid_in_float64():
    agree({"logsigmoid": F.logsigmoid, "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x))},
          [tensor([-700.0, -30.0, -20.5, 0.0, 20.5, 30.0, 700.0]).double()])


class Rounded(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.flat, self.free, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.flat(x)), self.free(x)


@pytest.mark.parametrize("function", [torch.round, torch.floor, torch.sign, lambda x: torch.floor(x / 0.3) * 0.3,
                                      lambda x: torch.bernoulli(x.sigmoid())])
def test_only_through_a_rounding(function):
    """Eager's gradients are zeros, with which AdamW decays a weight, and not none."""
    torch.manual_seed(0)
    module, x = Rounded(function), torch.randn(3, 4)
    model = ORTModule(module, DebugOptions(log_level=LogLevel.ERROR))
    rounded, free = model(x)
    assert rounded.requires_grad
    (rounded.sum() + free.sum()).backward()
    assert torch.equal(module.flat.weight.grad, torch.zeros(4, 4)) and module.free.weight.grad.any()
    module.zero_grad()
    model(x)[0].sum().backward()
    assert torch.equal(module.flat.bias.grad, torch.zeros(4)) and module.free.weight.grad is None
    assert onnxtrain.stats(model)["engine_steps"] == 2
