"""Slopes of clamps at their bounds, and of operands that are equal: those of the torch that is installed."""

import pytest
import torch
from agree import both, in_engine, module

X = torch.tensor([[-2.0, -1.0, 0.5, 1.0], [3.0, 1.0, -1.0, 0.0]])

BOUNDS = {
    "both": lambda h: h.clamp(-1.0, 1.0), "below": lambda h: h.clamp(min=-1.0), "above": lambda h: h.clamp(max=1.0),
    "tensors": lambda h: torch.clamp(h, torch.full((4,), -1.0), torch.full((4,), 1.0)),
    "hardtanh": torch.nn.functional.hardtanh, "relu6": torch.nn.functional.relu6,
    "softshrink": lambda h: torch.nn.functional.softshrink(h, 1.0),
    "fmax": lambda h: torch.fmax(h, h.flip(1)), "fmin": lambda h: torch.fmin(h, h.flip(1)),
    "maximum": lambda h: torch.maximum(h, h.flip(1)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_slopes(name):
    def use(model):
        leaf = X.clone().requires_grad_(True)
        result = model(leaf)
        (result * torch.arange(1.0, 9).view(2, 4)).sum().backward()
        return [result, leaf.grad]

    in_engine(both(module(lambda self, x: BOUNDS[name](x * 1) + 0 * self.fc(x)), use))
