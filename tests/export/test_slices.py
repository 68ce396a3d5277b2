"""Slices that are written and rows that are rolled have the values and gradients of eager's."""

import torch
from test_edges import Functions, agree

from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule


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
