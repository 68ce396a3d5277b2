"""An export is taken again for exactly the sizes and strides that it holds for."""

from __future__ import annotations

import timeit

import pytest
import torch
import torch.utils.checkpoint
from test_export import Of, check, compare

from onnxtrain._export import guards
from onnxtrain._export.guards import from_program
from onnxtrain.export import _without_grad

pytestmark = pytest.mark.filterwarnings("ignore")


def test_shape_guards() -> None:
    module = Of(lambda m, x: m.fc(x) * 2)
    exported = check(module, torch.randn(6, 4))
    assert exported.guards([torch.randn(9, 4)]) is None
    compare(exported, module, (torch.randn(9, 4),), {})
    for wrong in (torch.randn(6, 5), torch.randn(6)):
        assert isinstance(exported.guards([wrong]), str)
    pair = check(Of(lambda m, x, y: m.fc(x) + y), torch.randn(6, 4), torch.randn(6, 4))
    assert pair.guards([torch.randn(5, 4), torch.randn(5, 4)]) is None
    assert "dimension" in pair.guards([torch.randn(5, 4), torch.randn(7, 4)])
    leaves = [torch.randn(5, 4), torch.randn(5, 4)]
    assert min(timeit.repeat(lambda: pair.guards(leaves), number=1000, repeat=5)) / 1000 < 20e-6


def test_guards_about_strides() -> None:
    """A part gets what the one before left, a slice say: torch.export asks whether its stride is another's size."""
    class Asking(torch.nn.Module):
        def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
            return leaves[0] * (2 if leaves[0].stride(1) != leaves[0].shape[0] else 3)

    slices = [torch.randn(rows, 40)[:, ::3] for rows in (4, 6, 3)]
    auto = torch.export.Dim.AUTO
    program = torch.export.export(Asking(), (_without_grad(slices[0]),), strict=False, dynamic_shapes=[((auto, auto),)])
    guards = from_program(program)
    assert [guards([each]) is None for each in slices] == [True, True, False]


def test_a_layout_without_gaps() -> None:
    """As torch says of a tensor: its contiguous orders of dimensions, and none that repeats or leaves out elements."""
    x = torch.randn(2, 1, 3, 4)
    for y in (x, x.permute(2, 0, 3, 1), x[:, :, 1:], x.expand(2, 5, 3, 4), x[:, :, ::2], torch.ones(()), x[:0]):
        assert guards._is_dense(*y.shape, *y.stride()) == torch.ops.aten.is_non_overlapping_and_dense(y)
