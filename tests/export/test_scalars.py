"""Numbers of Python in the exported graph: of 53 bits until they meet a tensor, as in PyTorch,
also those made of sizes.
"""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule

CONSTANT = {
    "masked_fill": lambda x: x.masked_fill(x < 0.1, 0.3),
    "softplus": lambda x: F.softplus(x, 0.3, 0.7),
    "full": lambda x: torch.full((3,), 0.3, dtype=x.dtype)[:, None] * x[:3],
    "full_like": lambda x: torch.full_like(x, 0.3) * x,
    "alpha": lambda x: torch.sub(x, x * x, alpha=0.3) + torch.add(x, x, alpha=0.7),
    "power of a number": lambda x: torch.pow(0.3, x),
    "power": lambda x: (x.abs() + 1) ** 0.3,
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 2, value=0.3),
    "arange": lambda x: torch.arange(0, 0.9, 0.3, dtype=x.dtype)[:, None] * x[:3]
    + torch.arange(0.1, 2.7, dtype=x.dtype)[:, None] * x[:3],
    "arange of one": lambda x: torch.arange(2.3, dtype=x.dtype)[:, None] * x[:3],
    "arithmetic": lambda x: (0.1 - x) * 0.3 + x / 0.7,
    "where": lambda x: torch.where(x > 0.2, x, 0.3),
    "clamp": lambda x: x.clamp(-0.7, 0.3),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "pad": lambda x: F.pad(x, (1, 1), value=0.3),
}
OF_SIZES = {
    "power of a size": lambda x: x * x.shape[0] ** -0.5,
    "root": lambda x: x / math.sqrt(x.shape[0]),
    "product": lambda x: x.sum() / (x.shape[0] * 0.3),
    "reciprocal": lambda x: x + 1 / x.shape[0],
    "quotient": lambda x: x * (x.shape[0] / 7 + 0.1),
    "masked_fill": lambda x: x.masked_fill(x < 0.3, 1 / x.shape[0]),
    "exponent": lambda x: x ** (1 / x.shape[0]),
    "base": lambda x: torch.pow(1 / x.shape[0], x),
    "clamp": lambda x: x.clamp(max=1 / x.shape[0]),
    "where": lambda x: torch.where(x > 0.3, x, 1 / x.shape[0]),
    "full_like": lambda x: torch.full_like(x, 1 / x.shape[0]) * x,
    "pad": lambda x: F.pad(x, (1, 1), value=1 / x.shape[0]),
    "alpha": lambda x: torch.sub(x, x * x, alpha=1 / x.shape[0]),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=1 / x.shape[0]),
    "floor": lambda x: x * math.floor(x.shape[0] * 0.7),
    "matrices": lambda x: (x.mT @ x * x.shape[-2] ** -0.5).sum() * x,
    "comparison": lambda x: x * (x > 1 / x.shape[0]),
}


class Many(nn.Module):
    """All of a table at once: one export."""

    def __init__(self, functions, dtype):
        super().__init__()
        self.functions = list(functions)
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return tuple(f(x) * self.weight for f in self.functions)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("table", ["CONSTANT", "OF_SIZES"])
def test_numbers_have_all_their_bits(table, dtype):
    table = globals()[table]
    module = Many(table.values(), dtype)
    ours = ORTModule(module)
    generator = torch.Generator().manual_seed(3)
    for rows in (3, 4, 5):
        x = torch.rand(rows, 5, generator=generator, dtype=torch.float64).to(dtype)
        for name, got, want in zip(table, ours(x), module(x), strict=True):
            assert got.dtype == want.dtype, name
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance,
                                       msg=lambda m, name=name: f"{name}, {rows} rows: {m}")
    counts = onnxtrain.stats(ours)
    assert counts["fallback_steps"] == 0, counts["reasons"]


@pytest.mark.parametrize("bounds", [(0, 1, 0.1), (0, 0.9, 0.3), (1, 2.3, 0.1), (0, 4.2, 0.7), (3, -1, -0.4),
                                    (0, 1e3, 0.1)], ids=str)
def test_as_many_steps_as_torch(bounds):
    """Counted in float32, 0.1 makes one more of some ranges, one less of others."""
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return torch.arange(*bounds, dtype=torch.float32) * self.weight + x

    module, x = Steps(), torch.zeros(1)
    ours = ORTModule(module)
    got, want = ours(x), module(x)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert onnxtrain.stats(ours)["fallback_steps"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_keep_their_digits_beside_16_bits(dtype):
    """torch multiplies in float32, and rounds once; a factor of 16 bits would be off by up to 0.2% everywhere."""
    names = ("softplus", "addcmul", "lerp")
    functions = {name: CONSTANT[name] for name in names} | {
        "product": lambda x: x * 0.3333333, "quotient": lambda x: x / 0.3, "reciprocal": lambda x: 0.3 / (x.abs() + 1),
        "in place": lambda x: (x * 2).mul_(0.3), "rank 0": lambda x: x * torch.tensor(0.3),
    }
    x = torch.randn(1 << 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    eager, model = Many(functions.values(), dtype), ORTModule(Many(functions.values(), dtype))
    with torch.no_grad():
        pairs = zip(functions, eager(x), model(x), strict=True)
    unlike = {name: float((want != got).float().mean()) for name, want, got in pairs}
    assert max(unlike.values()) < 0.01, unlike
    assert onnxtrain.stats(model)["fallback_steps"] == 0
