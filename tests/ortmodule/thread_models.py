"""A module and its optimizers against eager, with more threads than cores, the number changed between steps and between
forward and backward: `python tests/ortmodule/thread_models.py`, in a process of its own, which a fault may end.

Between steps torch runs operators of its own on its threads, whose floating-point mode must be as it was. Programs are
built anew for a number of threads, and found again when it comes back.
"""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.optim import AdamWMode, FusedAdam
from onnxtrain.ortmodule import ORTModule

# Forward and backward; each once, and some again.
COUNTS = [(1, 1), (3, 3), (4, 4), (7, 7), (16, 16), (3, 3), (1, 16), (16, 3), (4, 7), (16, 1)]
TOLERANCE = 2e-3  # of the largest entry: two orders of summation


class Net(nn.Module):
    """What has two or three shares beside what has as many as there are threads, a library's products and convolution
    with a batch that is no multiple of them, attention, norms, an embedding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc, self.norm = nn.Embedding(300, 96), nn.Linear(96, 512), nn.LayerNorm(512)
        self.qkv, self.back = nn.Linear(96, 288, bias=False), nn.Linear(96, 96)
        self.conv, self.bn = nn.Conv2d(8, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
        self.chains = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (9_000, 33_000, 60_000, 120_000))

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.back(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])
        loss = self.norm(F.gelu(self.fc(x))).square().mean() + F.relu(self.bn(self.conv(images))).mean()
        for p in self.chains:
            loss = loss + (torch.tanh(p * 1.1 + 0.3) * torch.sigmoid(p)).mean()
        return loss


def torch_is_as_before(what: str) -> None:
    torch.randn(1 << 18).mul(1.1)
    kept = int(((torch.full((1 << 18,), 1e-40) + 1e-40) != 0).sum())
    assert kept == 1 << 18, f"{what}: torch keeps {kept} denormals of {1 << 18}"


def assert_near(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    error = float((a - b).abs().max() / max(1e-6, float(b.abs().max())))
    assert error <= TOLERANCE, f"{what} differs by {error:.2g} of its largest entry"


def main() -> None:
    torch.manual_seed(0)
    eager = Net()
    model = ORTModule(copy.deepcopy(eager))
    ours, theirs = FusedAdam(model.parameters(), adam_w_mode=AdamWMode.ADAMW_TORCH, eps=1e-8), torch.optim.Adam(eager.parameters())
    ids, images = torch.randint(0, 300, (2, 700)), torch.randn(3, 8, 29, 31)
    for before, after in COUNTS:
        what = f"{before} threads, then {after}"
        print(what, flush=True)
        for one in (eager, model):
            torch.set_num_threads(before)
            loss = one(ids, images)
            torch.set_num_threads(after)
            loss.backward()
            if one is eager:
                expected = loss.item()
        torch_is_as_before(what)
        assert abs(loss.item() - expected) <= 1e-4 * abs(expected), f"{what}: loss {loss.item()}, eager {expected}"
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert_near(p.grad, q.grad, f"{what}: the gradient of {name}")
            p.grad.copy_(q.grad)  # of a tiny one Adam makes a whole step
        ours.step()
        theirs.step()
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda m: f"{what}: {name}: {m}")
        ours.zero_grad()
        theirs.zero_grad()
        torch_is_as_before(what)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == len(COUNTS) and counts["fallback_steps"] == 0, counts


if __name__ == "__main__":
    main()
