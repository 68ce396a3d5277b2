"""Training in bfloat16 and float16, by autocast and by modules of that type: float32 stays where PyTorch keeps it."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import RECENT

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
    "cross_entropy of smoothed labels": lambda m, x: F.cross_entropy(m.fc(x), torch.tensor([0, 3, 1, 2, 5]),
                                                                     label_smoothing=0.1),
    "cross_entropy of shares": lambda m, x: F.cross_entropy(m.fc(x), x.detach().softmax(-1)),
    "mse_loss": lambda m, x: F.mse_loss(m.fc(x), x),
    "l1_loss": lambda m, x: F.l1_loss(m.fc(x), x.to(m.fc(x).dtype), reduction="none"),
    "mse_loss to integers": lambda m, x: F.mse_loss(  # whose gradient torch 2.10 refuses
        m.fc(x), torch.arange(8, dtype=None if RECENT else x.dtype).expand(5, 8)),
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


class Residual(nn.Module):
    """Convolutions with what stands between them in residual networks; `conv` and `norm` are of one rank."""

    def __init__(self, conv, norm, **options):
        super().__init__()
        self.stem = conv(3, 32, 3, stride=2, padding=1, bias=False)
        self.one, self.two = conv(32, 64, 1, bias=False), conv(64, 64, 3, padding="same", bias=False, **options)
        self.three, self.side = conv(64, 32, 1, stride=2, bias=False), conv(32, 32, 1, stride=2)
        self.norms = nn.ModuleList(norm(n) for n in (32, 64, 64, 32))

    def forward(self, x):
        x = self.norms[0](self.stem(x)).relu()
        y = self.norms[1](self.one(x)).relu()
        y = self.norms[2](self.two(y)).relu()
        return (self.norms[3](self.three(y)) + self.side(x)).relu()


CONVOLUTIONS = {
    "1-d": (nn.Conv1d, nn.BatchNorm1d, (3, 3, 157), {}),
    "2-d": (nn.Conv2d, nn.BatchNorm2d, (3, 3, 25, 31), {}),
    "3-d": (nn.Conv3d, nn.BatchNorm3d, (2, 3, 9, 11, 7), {}),
    "one image": (nn.Conv2d, nn.BatchNorm2d, (1, 3, 33, 33), {}),
    "groups": (nn.Conv2d, nn.BatchNorm2d, (2, 3, 25, 31), {"groups": 4}),
    "depthwise": (nn.Conv2d, nn.BatchNorm2d, (2, 3, 25, 31), {"groups": 64}),
    "dilated": (nn.Conv2d, nn.BatchNorm2d, (2, 3, 25, 31), {"dilation": 2}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_norms(name):
    """Beside eager under autocast: result, every gradient and running statistics are as near to float64."""
    conv, norm, shape, options = CONVOLUTIONS[name]
    torch.manual_seed(2)
    exact = Residual(conv, norm, **options)
    x = torch.randn(shape)
    found = []
    for model, autocast in ((copy.deepcopy(exact).double(), False), (copy.deepcopy(exact), True),
                            (ORTModule(copy.deepcopy(exact)), True)):
        data = x.to(next(model.parameters()).dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(data)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        loss = (y.to(data.dtype) * weights).sum()
        loss.backward()
        found.append([loss.detach(), y.detach(), data.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    names = ["loss", "y", "x", *(n for n, _ in exact.named_parameters()), *(n for n, _ in exact.named_buffers())]
    for n, true, want, got in zip(names, *found, strict=True):
        assert got.dtype == want.dtype, n
        size = max(float(true.double().norm()), 1e-30)
        mine, theirs = (float((r.double() - true).norm()) / size for r in (got, want))
        assert mine <= 1.25 * theirs + 4e-3, f"{n}: off by {mine:.1e}, eager by {theirs:.1e}"
