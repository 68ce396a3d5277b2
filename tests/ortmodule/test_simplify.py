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
    "a constant of Python, written": lambda m, x: _filled(torch.tensor([0.0, 0.0]), m.fc(x)),
    "detached zeros, written": lambda m, x: _filled(torch.zeros(2).detach(), m.fc(x)),
    "a view, written with another shape": lambda m, x: _filled(torch.zeros(3, 2).t(), m.fc(x)),
    "a diagonal, written": lambda m, x: _diagonal(m.fc(x)),
    "a diagonal, filled": lambda m, x: torch.ones(4, 4).fill_diagonal_(0.0) * m.fc(x)[0, 0],
    "overwritten through a view of other sizes": lambda m, x: _overwritten(m.fc(x) * 1, x),
    "a copy without gradients, of other shapes": lambda m, x: _copied(m.fc(x)),
}


def _filled(made, y):
    made[0] = y.sum()
    made[1].copy_(y.mean())
    return made * 2


def _diagonal(y):
    y = y * 1
    y.diagonal(1, 2, 0).copy_(y[0].sum() * 2)
    return y


def _overwritten(y, x):
    first = y.view(y.shape)
    y.view(3, 20).copy_(x.view(-1)[:20])
    return first * 2


def _copied(y):
    rows, whole = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int64)
    with torch.no_grad():
        rows.copy_(y[0, 0])
        rows[1:].detach().copy_(y[1, 0])
        whole.copy_(y[2, 0] * 5)
    return y * rows[:, None] + whole[:, None]


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


def _hidden(m, x):
    h = m.fc(x)
    with torch.no_grad():
        h[0] = 0
    return h.square()


def _unseen(m, x):
    held = torch.zeros(4)
    other = held.detach()
    other.copy_(m.fc(x)[0, 0])
    return m.fc(x) + held + other


def _kept(m, x):
    m.held.copy_(m.fc(x)[0, 0])
    return m.fc(x) + m.held


@pytest.mark.parametrize("forward, reason, code", [
    (_hidden, "without autograd seeing it", "h[0] = 0"),
    (_unseen, "also holds behind detach()", "other.copy_(m.fc(x)[0, 0])"),
    (_kept, "a gradient into its buffer or attribute", "m.held.copy_(m.fc(x)[0, 0])")])
def test_a_write_whose_gradients_no_graph_has_runs_in_pytorch(forward, reason, code):
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.held = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, x):
            return forward(self, x)

    (said,) = onnxtrain.stats(both(Made, _trained(X)))["reasons"]
    assert reason in said and f"{__file__}, line " in said and said.endswith(f"({code})")


@pytest.mark.parametrize("forward", [lambda m, x: m.fc(x).transpose(0, 1), lambda m, x: m.fc(x).permute(2, 0, 1) * 2,
                                     lambda m, x: (m.fc(x.to(memory_format=torch.channels_last)), x * 2)[0]])
def test_results_lie_in_memory_as_in_eager(forward):
    """stride(), as_strided() and randn_like() of a result would tell."""
    def use(model):
        x = torch.arange(24.0).view(2, 3, 1, 4)[:, :, 0] if forward.__code__.co_names[-1] != "channels_last" else (
            torch.arange(48.0).view(2, 3, 2, 4))
        y = model(x)
        y.square().sum().backward()
        return y, y.stride(), torch.randn_like(y)

    in_engine(both(module(forward), use, 1e-4))


def scanned(m, x):
    from torch._higher_order_ops.associative_scan import associative_scan

    h = m.fc(x)
    return associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (h.sigmoid(), h), 0,
                            combine_mode="generic")[1]


@pytest.mark.parametrize("forward", [lambda m, x: torch.vmap(lambda row: row.sin() * row.sum())(m.fc(x)), scanned])
def test_vmap_in_forward_runs_in_the_engine(forward):
    in_engine(both(module(forward), _trained(X[0]), 1e-5))


def test_a_write_beside_vmap_runs_in_pytorch():
    def forward(m, x):
        h = m.fc(x).mul_(2)
        return torch.vmap(lambda row: row * row.sum())(h)

    (said,) = onnxtrain.stats(both(module(forward), _trained(X[0])))["reasons"]
    assert "calls torch.vmap() and changes a tensor in place" in said and f"{__file__}, line " in said
