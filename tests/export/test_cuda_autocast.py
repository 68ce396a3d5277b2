"""CUDA's autocast in an export, told without a GPU: dtypes of fake tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from onnxtrain._export import replacements


@pytest.fixture
def autocast() -> Iterator[None]:
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)  # torch.autocast("cuda") turns itself off where there is no GPU
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


class Losses(torch.nn.Module):
    def __init__(self, functions) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x, y, w):
        return [function(x, y, weight) for function in self.functions for weight in (None, w)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_have_the_dtype_of_eager(autocast, dtype):
    """Also once torch.export has taken them apart, which it does behind the region of autocast."""
    with FakeTensorMode():
        x, w = torch.randn(4, 5, device="cuda", dtype=dtype), torch.rand(5, device="cuda", dtype=dtype)
        y = torch.zeros(4, device="cuda", dtype=torch.int64)
        want = [t.dtype for t in Losses([F.cross_entropy, F.nll_loss])(x, y, w)]
        program = torch.export.export(Losses([replacements.cross_entropy, replacements.nll_loss]), (x, y, w))
        results = list(program.run_decompositions({}).graph.nodes)[-1].args[0]
    assert want == [torch.float32] * 4
    assert [node.meta["val"].dtype for node in results] == want
