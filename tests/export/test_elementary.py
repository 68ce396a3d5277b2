"""Logarithms, deviations, quotients and functions near zero keep the digits, the range and the slopes of eager's."""

import torch
from test_edges import INF, NAN, TIES, Functions, agree
from torch import nn, tensor

from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule


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


def test_logarithms_of_sums():
    """No power of the operands is infinite, nor is a slope lost where the first operand is zero."""
    numbers = tensor([0.0, 1.0, -3.0, 88.0, -88.0, 200.0, -1e4, 1e30])
    a, b = numbers.repeat_interleave(len(numbers)), numbers.repeat(len(numbers))
    agree({"logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2}, [a, b])
    agree({"logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2}, [tensor([INF, -INF, 1.0, INF]),
                                                                           tensor([2.0, 2.0, -INF, -INF])])
    agree({"xlog1py": torch.special.xlog1py}, [tensor([0.0, -0.0, 2.0, 0.0, 0.0]), tensor([1.0, 0.5, 3.0, -1.5, 0.0])])


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


def test_whole_numbers():
    a, b = tensor([7, -7, 2**30 + 1, -(2**40) - 1, 0]), tensor([2, 2, 3, 7, 5])
    agree({"floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
           "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "floor_divide": torch.floor_divide,
           "remainder": torch.remainder, "fmod": torch.fmod, "true": torch.div,
           "xlogy": lambda a, b: torch.xlogy(a, 0.5), "copysign": lambda a, b: torch.copysign(a, -0.5),
           "xlogy of both": lambda a, b: torch.xlogy(a.abs(), b)}, [a, b])


def test_digits_of_small_results():
    """1 - Erf and Exp - 1 have none left."""
    agree({"erfc": torch.erfc}, [torch.linspace(-3, 8, 23)])
    agree({"expm1": torch.special.expm1}, [torch.logspace(-12, 1, 14)])
    agree({"its logarithm": lambda x: torch.special.erfc(x).log()}, [torch.linspace(1, 8, 15)])
