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


def test_slices_that_are_written():
    def inplace(x, y):
        x = x.clone()
        x[:, 1:3], x[-2:], x[1:, ::2] = y[:, :2], y[-2:], 0
        return x

    agree({"inner": lambda x, y: torch.slice_scatter(x, y[:, :2], 1, 1, 3),
           "all": lambda x, y: torch.slice_scatter(x, y, 1),
           "none": lambda x, y: torch.slice_scatter(x, y[:, :0], 1, 2, 2),
           "end": lambda x, y: torch.slice_scatter(x, y[:2], 0, 1, 9),
           "from the end": lambda x, y: torch.slice_scatter(x, y[:2], 0, -2), "in place": inplace,
           "steps": lambda x, y: torch.slice_scatter(x, y[:, :2], 1, 0, 4, 2)}, [torch.randn(3, 4), torch.randn(3, 4)])


def test_rolls():
    agree({f"{shifts} of {dims}": lambda x, s=shifts, d=dims: torch.roll(x, s, d) for shifts, dims in (
        (1, 0), (-2, 1), (7, -1), (0, 0), (4, 1), ((1, -1), (0, 1)), ((1, 2), (1, 1)), (2, None))}, [torch.randn(3, 4)])
    agree({"of none": lambda x: torch.roll(x, 2, 1)}, [torch.randn(3, 0)])
    model = ORTModule(Functions([lambda x: x.roll(2, 0)]), DebugOptions(log_level=LogLevel.ERROR))
    for shape in ((3, 4), (5, 4), (1, 4)):  # sizes that are no numbers
        x = torch.randn(shape)
        assert torch.equal(model([[x]])[0], x.roll(2, 0))


def test_logarithms_of_whole_powers():
    twos, tens = torch.arange(-125.0, 127.0).exp2(), torch.logspace(-30, 30, 61, dtype=torch.float64).float()
    model = ORTModule(Functions([torch.log2, torch.log10]), DebugOptions(log_level=LogLevel.ERROR))
    for got, want in zip(model([[twos], [tens]]), (torch.log2(twos), torch.log10(tens)), strict=True):
        assert torch.equal(got, want)
    beside = tensor([1.0, 2.0, 8.0, 100.0]) * (1 + torch.tensor([[-6e-8], [1.2e-7], [5e-7], [1e-6]]))
    agree({"log2": torch.log2, "log10": torch.log10}, [beside])


def test_float64_keeps_its_digits_and_its_range():
    class Wide(nn.Module):
        def forward(self, x):
            return x.log2(), x.log10(), x.isinf(), x.isposinf(), (-x).isneginf(), torch.nan_to_num(x, posinf=1.0)

    x = tensor([0.3, 7.0, 1e300, INF]).double()
    for got, want in zip(ORTModule(Wide(), DebugOptions(log_level=LogLevel.ERROR))(x), Wide()(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-15, atol=0)


def test_small_numbers_keep_their_digits():
    tiny = tensor([1e-7, -1e-7, 3e-6, 1e-4, 0.02])
    model = ORTModule(Functions([torch.log1p, torch.expm1]), DebugOptions(log_level=LogLevel.ERROR))
    for got, function in zip(model([[tiny], [tiny]]), (torch.log1p, torch.expm1), strict=True):
        torch.testing.assert_close(got, function(tiny), rtol=1e-6, atol=0)


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


def test_logarithms_of_sums():
    """No power of the operands is infinite, nor is a slope lost where the first operand is zero."""
    numbers = tensor([0.0, 1.0, -3.0, 88.0, -88.0, 200.0, -1e4, 1e30])
    a, b = numbers.repeat_interleave(len(numbers)), numbers.repeat(len(numbers))
    agree({"logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2}, [a, b])
    agree({"logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2}, [tensor([INF, -INF, 1.0, INF]),
                                                                           tensor([2.0, 2.0, -INF, -INF])])
    agree({"xlog1py": torch.special.xlog1py}, [tensor([0.0, -0.0, 2.0, 0.0, 0.0]), tensor([1.0, 0.5, 3.0, -1.5, 0.0])])


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


def test_sums_that_vanish():
    """Deviations and norms of constant rows are flat there, where a root's slope is not a number."""
    agree({"std": lambda x: x.std(1), "std of a population": lambda x: x.std(0, unbiased=False), "all": torch.std,
           "std_mean": lambda x: torch.std_mean(x, 1, keepdim=True)[0],
           **{f"norm {p}": lambda x, p=p: x.norm(p, dim=1) for p in (-1, 0.5, 1.5, 3, 4)},
           "of one": lambda x: x[:1].std(0), "of more": lambda x: x.std(1, correction=-1.5),
           "of two dims": lambda x: x.std((0, 1)), "of no row": lambda x: x[:0].std(1), "none": lambda x: x[:0].std(0),
           "mean": lambda x: torch.std_mean(x)[1], "of two": lambda x: torch.std_mean(x, (0, 1), correction=0)[0],
           "norm of all": lambda x: torch.linalg.vector_norm(x * 0, 3, keepdim=True)}, [TIES])
    agree({"norm 3": lambda x: (x * 1e10).norm(3, dim=1), "std_mean": lambda x: torch.std_mean(x, 1)[0]},
          [TIES.bfloat16()], gradients=False)


def test_remainders_by_zero():
    agree({"fmod": torch.fmod, "remainder": torch.remainder},
          [tensor([1.0, -2.0, 0.0, INF, NAN]), tensor([0.0, 0.0, 0.0, 2.0, 1.0])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_of_numbers_that_are_none(dtype):
    x = tensor([NAN, 0.25, -3.0, 3.0, 0.0]).to(dtype)
    agree({"softshrink": F.softshrink, "logit": lambda x: torch.logit(x, 1e-3),
           "norm 0": lambda x: x.detach().norm(0) + x.detach()[1:].norm(0, dim=0)}, [x])
    agree({"entr": torch.special.entr}, [tensor([INF, 0.5, 2.0, 0.0, -1.0, NAN]).to(dtype)])
    agree({"heaviside": lambda x, y: torch.heaviside(x.detach(), y.detach())}, [x, x.flip(0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_times_the_logarithm_of_zero(dtype):
    """The slope in the second operand is the quotient of both."""
    x = tensor([0.0, 0.0, 1.0, 2.0, -1.0]).to(dtype)
    agree({"xlogy": torch.xlogy, "number": lambda x, y: torch.xlogy(0, y)},
          [x, tensor([0.0, 1.0, 0.0, 3.0, 2.0]).to(dtype)])
    agree({"xlog1py": torch.special.xlog1py}, [x, tensor([-1.0, 0.0, -1.0, 3.0, 2.0]).to(dtype)])


def test_a_number_read_from_float64():
    def scaled(x):
        return x * (x.detach().sum() / 3).item()

    x = tensor([0.1, 0.7], dtype=torch.float64)
    model = ORTModule(Functions([scaled]), DebugOptions(log_level=LogLevel.ERROR))
    torch.testing.assert_close(model([[x]])[0], scaled(x), rtol=1e-15, atol=0)
    assert onnxtrain.stats(model)["engine_steps"] == 1


def test_whole_numbers():
    a, b = tensor([7, -7, 2**30 + 1, -(2**40) - 1, 0]), tensor([2, 2, 3, 7, 5])
    agree({"floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
           "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "floor_divide": torch.floor_divide,
           "remainder": torch.remainder, "fmod": torch.fmod, "true": torch.div,
           "xlogy": lambda a, b: torch.xlogy(a, 0.5), "copysign": lambda a, b: torch.copysign(a, -0.5),
           "xlogy of both": lambda a, b: torch.xlogy(a.abs(), b)}, [a, b])


def test_shifts_of_unsigned_numbers():
    x = tensor([200, 7, 129, 0]).to(torch.uint8)
    agree({"left": lambda x: x << 1, "right": lambda x: x >> 4, "of a number": lambda x: 3 << (x & 3),
           "by each other": lambda x: (x >> (x & 3)) << (x & 1), "too far": lambda x: x << 9}, [x])


def test_truth_of_unsigned_numbers():
    x = tensor([[200, 0, 129], [1, 0, 2]]).to(torch.uint8)
    agree({"any": torch.any, "all": torch.all, "any of a row": lambda x: x.any(1),
           "all of two": lambda x: x.all((0, 1)), "bool": lambda x: x.bool().any(0), "none": lambda x: x[:0].any(),
           "none is not": lambda x: x[:0].all()}, [x])


def test_mixed_dtypes():
    wide = SECOND.double()
    agree({name: BINARY[name] for name in ("fmax", "fmin", "copysign", "hypot")}, [FIRST, wide])
    base, whole = tensor([0.5, 2.0, 3.0]), tensor([2, -1, 3])
    agree({"float64": lambda x: torch.pow(x, base.double()), "of int64": lambda x: torch.pow(whole, x),
           "of bfloat16": lambda x: torch.pow(base.bfloat16(), x), "of a number": lambda x: torch.pow(tensor(2), x),
           "of one float64": lambda x: torch.pow(tensor(0.3).double(), x), "whole": lambda x: torch.pow(x, whole),
           "one float64": lambda x: torch.pow(x, tensor(0.3).double())}, [base])


def test_ends_have_no_gradient():
    agree({"linspace": lambda x: torch.linspace(x[0], x[-1], 5) * x[1],
           "logspace": lambda x: torch.logspace(x[3], end=x[2], steps=5) * x[4]}, [FINITE])


def test_infinity_beside_what_is_picked():
    """No product with zero picks an entry."""
    x = VALUES.repeat(6).view(3, 4, 5)
    agree({f"diagonal {offset} {dims}": lambda x, offset=offset, dims=dims: x.diagonal(offset, *dims)
           for offset in (0, 1, -1, 9) for dims in ((0, 1), (-2, -1), (2, 0))} | {
        "of a matrix": lambda x: torch.diag(x[0]), "traces": lambda x: torch.einsum("iij->ij", x[:, :3]),
        "of none": lambda x: x[:0].diagonal(0, 1, 2), "of truth": lambda x: (x > 0).diagonal(),
        "nearest": lambda x: F.interpolate(x, scale_factor=1.5),
        "exact": lambda x: F.interpolate(x.unsqueeze(0), scale_factor=(0.7, 2.3), mode="nearest-exact")}, [x])


def test_margins_that_are_met():
    scores, labels = tensor([[0.0, 1, 2], [1, 0, NAN], [2, 3, INF]]), tensor([1, 0, 2])
    rows = tensor([[1, -1, 0], [0, 1, -1], [2, -1, 1]])
    agree({"multi": lambda x: F.multi_margin_loss(x, labels), "square": lambda x: F.multi_margin_loss(x, labels, 2),
           "weighted": lambda x: F.multi_margin_loss(x, labels, 1, 2.0, tensor([0.5, 1, 2]), reduction="none"),
           "sum": lambda x: F.multi_margin_loss(x[:2], labels[:2], reduction="sum"),
           "one": lambda x: F.multi_margin_loss(x[0], labels[0]),
           "multilabel": lambda x: F.multilabel_margin_loss(x, rows, reduction="none")}, [scores])


def test_running_product_of_one_row():
    agree({"cumprod": lambda x: x.cumprod(0), "of a number": lambda x: x[0].cumprod(0)}, [FINITE])


def test_norm_of_all_entries():
    agree({"kept": lambda x: torch.linalg.vector_norm(x, keepdim=True), "one": lambda x: torch.linalg.vector_norm(x, 3),
           "old": lambda x: torch.linalg.norm(x, keepdim=True), "frobenius": torch.linalg.norm}, [TIES])


def test_functions_that_torch_runs():
    """erfcx and log_ndtr by ONNX's Erf have no digit left where it is one."""
    agree({"erfcx": torch.special.erfcx, "log_ndtr": torch.special.log_ndtr}, [torch.linspace(-12, 9, 22)])


def test_digits_of_small_results():
    """1 - Erf and Exp - 1 have none left."""
    agree({"erfc": torch.erfc}, [torch.linspace(-3, 8, 23)])
    agree({"expm1": torch.special.expm1}, [torch.logspace(-12, 1, 14)])
    agree({"its logarithm": lambda x: torch.special.erfc(x).log()}, [torch.linspace(1, 8, 15)])


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


def test_zeros_of_either_sign_among_the_arguments():
    class Signed(nn.Module):
        def forward(self, x, s):
            return torch.copysign(x, torch.full_like(x, s))

    model = ORTModule(Signed(), DebugOptions(log_level=LogLevel.ERROR))
    assert torch.equal(model(TIES, 0.0), TIES.abs()) and torch.equal(model(TIES, -0.0), -TIES.abs())
    for _ in range(2):
        model(TIES, NAN)
    assert onnxtrain.stats(model)["exports"] == 3
