"""Training in bfloat16 and float16, by autocast and by modules of that type: float32 stays where PyTorch keeps it."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.optim import AdamWMode, FusedAdam
from onnxtrain.ortmodule import ORTModule

FUNCTIONS = {
    "linear": lambda m, x: m.fc(x),
    "matmul": lambda m, x: x @ m.fc.weight,
    "softmax": lambda m, x: F.softmax(m.fc(x), -1),
    "log_softmax": lambda m, x: F.log_softmax(m.fc(x), -1),
    "layer_norm": lambda m, x: m.norm(m.fc(x)),
    "gelu": lambda m, x: F.gelu(m.fc(x)),
    "sum": lambda m, x: m.fc(x).sum(0),
    "mean": lambda m, x: m.fc(x).mean(),
    "norm": lambda m, x: torch.linalg.vector_norm(m.fc(x), dim=-1),
    "cross_entropy": lambda m, x: F.cross_entropy(m.fc(x), torch.tensor([0, 3, 1, 2, 5])),
    "mse_loss": lambda m, x: F.mse_loss(m.fc(x), x),
    "l1_loss": lambda m, x: F.l1_loss(m.fc(x), x.to(m.fc(x).dtype), reduction="none"),
    "mse_loss to integers": lambda m, x: F.mse_loss(m.fc(x), torch.arange(8).expand(5, 8)),
    "abs": lambda m, x: m.fc(x).abs(),
    "cumsum": lambda m, x: m.fc(x).cumsum(0),
    "residual": lambda m, x: x + m.fc(x),
    "attention": lambda m, x: F.scaled_dot_product_attention(*(m.fc(x)[None, None],) * 3),
    "batch_norm": lambda m, x: m.batch(m.fc(x)),
    "einsum": lambda m, x: torch.einsum("ij,kj->ik", x, m.fc.weight),
    "einsum of two types": lambda m, x: torch.einsum("ij,kj->ik", m.fc(x), m.fc.weight),
    "einsum without a sum": lambda m, x: torch.einsum("ij,ik->ijk", x, m.fc.weight[:5]),
    "tensordot": lambda m, x: torch.tensordot(x, m.fc.weight, 1),
    "inner": lambda m, x: torch.inner(x, m.fc.weight),
    "multi_dot": lambda m, x: torch.linalg.multi_dot((x[0], m.fc.weight, m.fc.weight)),
    "chain_matmul": lambda m, x: torch.chain_matmul(x, m.fc.weight, m.fc.weight),
    "gru cell": lambda m, x: m.gru(m.fc(x)),
    "lstm cell": lambda m, x: m.lstm(m.fc(x))[1],
    "rnn cell": lambda m, x: m.rnn(m.fc(x)),
}


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.batch = nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.gru, self.lstm, self.rnn = nn.GRUCell(8, 3), nn.LSTMCell(8, 3), nn.RNNCell(8, 3)

    def forward(self, x):
        return tuple(f(self, x) for f in FUNCTIONS.values())


def results(model, x, autocast):
    """Results and gradients, which come from every result."""
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        found = model(x)
    sum(r.float().square().sum() for r in found).backward()
    return found, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "module"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_types_and_values_are_those_of_pytorch(dtype, autocast):
    """Each result has eager's type; its distance to float32 is about that of eager's,
    so nothing was rounded more often.
    """
    torch.manual_seed(0)
    exact = Many()
    x = torch.randn(5, 8)
    given = exact if autocast else copy.deepcopy(exact).to(dtype)
    data, mode = (x, dtype) if autocast else (x.to(dtype), None)
    eager, ours = copy.deepcopy(given), ORTModule(copy.deepcopy(given))
    (true, true_grads), (want, want_grads), (got, got_grads) = (
        results(copy.deepcopy(exact), x, None), results(eager, data, mode), results(ours, data, mode))
    counts = onnxtrain.stats(ours)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    least = 4 * torch.finfo(dtype).eps
    for name, t, w, g in zip([*FUNCTIONS, *(n for n, _ in exact.named_parameters())], (*true, *true_grads),
                             (*want, *want_grads), (*got, *got_grads), strict=True):
        assert g.dtype == w.dtype, f"{name}: {g.dtype}, expected {w.dtype}"
        size = float(t.abs().max())
        mine, theirs = (float((y.float() - t).abs().max()) for y in (g, w))
        assert mine <= 2 * theirs + least * max(size,
                                                1), f"{name}: off by {mine:.1e}, eager by {theirs:.1e}, of {size:.1e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_module_of_that_type_trains(dtype):
    """Ten steps with FusedAdam: the loss falls as eager's does with torch's AdamW."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(dtype)
    x, y = torch.randn(64, 8).to(dtype), torch.randint(0, 4, (64,))
    losses = []
    for model in (copy.deepcopy(module), ORTModule(copy.deepcopy(module))):
        if isinstance(model, ORTModule):
            optimizer = FusedAdam(model.parameters(), lr=1e-2, eps=1e-4, adam_w_mode=AdamWMode.ADAMW_TORCH,
                                  weight_decay=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        assert all(p.dtype == dtype for p in model.parameters())
    assert losses[1] < 1.3 and abs(losses[0] - losses[1]) < 0.05, losses
