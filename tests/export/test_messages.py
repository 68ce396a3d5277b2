"""An exception of forward points at the user's lines, as eager's does, whatever of it ran in a graph."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from onnxtrain.ortmodule import ORTModule


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def scores(self, x):
        return self.head(torch.tanh(self.body(x)))

    def forward(self, x, labels):
        scores = self.scores(x)
        return F.cross_entropy(scores, labels)


class Raising(Net):
    def forward(self, x, labels):
        try:
            return {}["loss"]
        except KeyError as error:
            raise ValueError("no loss") from error


class Adding(Net):
    def forward(self, x, labels):
        return (self.scores(x) + labels).sum()


GOOD = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
WRONG = {
    "label": (Net, (GOOD[0], torch.full((4,), 7))),
    "dtype": (Net, (GOOD[0].double(), GOOD[1])),
    "shape": (Net, (torch.randn(4, 9), GOOD[1])),
    "raises": (Raising, GOOD),
    "broadcast": (Adding, GOOD),
}


def raised(model, arguments):
    """Message, the frames that are no library's, and how many exceptions are shown."""
    with pytest.raises(Exception) as found:
        model(*arguments)
    lines = [(frame.lineno, frame.name, frame.line) for frame in traceback.extract_tb(found.value.__traceback__)
             if frame.filename == __file__ and frame.name != "raised"]
    shown = "".join(traceback.format_exception(found.value)).count("Traceback (most recent call last)")
    assert "eval_with_key" not in "".join(traceback.format_tb(found.value.__traceback__))
    return type(found.value), str(found.value), lines, shown


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", WRONG)
def test_an_error_shows_the_users_lines(kind, is_first, caplog):
    make, arguments = WRONG[kind]
    eager = make()
    expected = raised(eager, arguments)
    model = ORTModule(eager)
    if not is_first and make is Net:
        model(*GOOD).backward()
    for _ in range(3):
        assert raised(model, arguments) == expected
    assert "runs in PyTorch, not in the onnxtrain engine" not in caplog.text  # PyTorch's error says it all
