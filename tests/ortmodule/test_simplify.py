"""How elements lie in memory, which decides what view() and as_strided() give; and values that are overwritten."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import both, in_engine, module

import onnxtrain

X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))


def _heads(m, x):
    """Of shape (batch, heads, tokens, 2)."""
    return m.fc(x).view(*x.shape[:2], 2, 2).transpose(1, 2)


def _trained(x):
    def use(model):
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(True)
        result = model(leaf)
        (result * torch.linspace(0.5, 1.5, result.numel()).view(result.shape)).sum().backward()
        return [result, leaf.grad]

    return use


FORWARDS = {
    "attention, contiguous, view": lambda m, x: F.scaled_dot_product_attention(
        *[_heads(m, x)] * 3, is_causal=True).transpose(1, 2).contiguous().view(x.shape),
    "attention, view": lambda m, x: F.scaled_dot_product_attention(*[_heads(m, x)] * 3).transpose(1, 2).view(x.shape),
    "as_strided of a transposed": lambda m, x: m.fc(x)[0].t().as_strided((2, 3), (1, 2)),
    "as_strided of a slice": lambda m, x: m.fc(x)[:, 1:].as_strided((2, 2), (4, 1)),
    "overwritten": lambda m, x: m.fc(x).copy_(x * 2),
    "filled through a view": lambda m, x: (h := m.fc(x)).view(-1).fill_(2.0).sum() + h,
    "a broadcast of another type": lambda m, x: m.fc(x).mul(2).copy_(torch.arange(4)) + m.fc(x),
    "detached in place": lambda m, x: (h := m.fc(x) * 2).detach_() + m.fc(h),
    "rows, one by one": lambda m, x: _rows(m, x),
}


def _rows(m, x):
    made = torch.zeros(3, 4)
    for i in range(3):
        made[i] = m.fc(x[i, 0])
    return made


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_as_in_eager(name, autocast):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return FORWARDS[name](self, x).float()

    in_engine(both(module(forward), _trained(X), 5e-2 if autocast else 1e-5))


def test_one_text_with_arguments_of_two_orders():
    """The second call must not have the first one's export."""
    def use(model):
        results = []
        for x in (X[0], X[0].t().contiguous().t()):
            leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(True)
            results += [model(leaf).detach()]
        return results

    both(module(lambda self, x: self.fc(x).sum() + x.as_strided((2, 3), (3, 1))), use)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


Straight.__module__ = "torch.mine"


def test_a_function_whose_module_begins_with_torch_keeps_its_backward():
    in_engine(both(module(lambda self, x: Straight.apply(self.fc(x))), _trained(X)))


def test_a_write_that_autograd_does_not_see_runs_in_pytorch():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            with torch.no_grad():
                h[0] = 0
            return h.square()

    model = both(Hidden, _trained(X))
    assert "without autograd seeing it" in onnxtrain.stats(model)["reasons"][0]
