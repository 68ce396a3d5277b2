"""Small modules whose forward does what scripts do and captures find hard, beside eager and torch.compile.

    python tests/bench/forwards.py [NAME...] [--steps 20] [--without-compile]

Each takes steps of forward and backward with the same inputs, which change from step to step, in turns: eager,
torch.compile, ORTModule. A row has the median of a step in milliseconds, the first step in seconds, the calls that ran
in the engine and in PyTorch, the cuts, and the largest relative difference of losses and gradients from eager's.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("ORTMODULE_CACHE_DIR", "")  # the first step is timed
os.environ.setdefault("ORTMODULE_LOG_LEVEL", "ERROR")

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

import onnxtrain  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

WIDTH, ROWS = 64, 32


class Attention(nn.Module):
    """nanoGPT's: heads joined by transpose(), contiguous() and view()."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(x).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class Counts(nn.Module):
    """A counter, a float and a growing list on self."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls, self.rate, self.seen = nn.Linear(WIDTH, WIDTH), 0, 1.0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rate *= 0.99
        self.seen.append(self.calls)
        return self.fc(x) * self.rate


class Crops(nn.Module):
    """A size that a tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[:, : int((x[0, :, 0] > 0).sum().item()) + 1]


class Tutorial(nn.Module):
    """nn.Transformer with a float causal mask and boolean padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(WIDTH, 4, 1, 1, 128, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -3:] = True
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.net(x, x, tgt_mask=mask, src_key_padding_mask=padding, tgt_key_padding_mask=padding)[:, :-3]


class Cells(nn.Module):
    """LSTMCell in a loop of 25."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], WIDTH)
        for _ in range(25):
            h, c = self.cell(x[:, 0], (h, c))
        return h


class Packed(nn.Module):
    """A packed BiLSTM under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(WIDTH, WIDTH, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(x.shape[0]) % x.shape[1] + 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(packed)[0].data.float()


class Policy(nn.Module):
    """PPO: log probabilities of actions that were drawn within no_grad()."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.distributions.Categorical(logits=self.net(x[:, 0]))
        with torch.no_grad():
            action = made.sample()
        return made.log_prob(action) + made.entropy()


class Fourier(nn.Module):
    """A complex product of spectra, as FNO has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 8, dtype=torch.cfloat) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.transpose(1, 2))
        made = torch.zeros_like(spectrum)
        made[:, :, :8] = torch.einsum("bix,iox->box", spectrum[:, :, :8], self.weight)
        return torch.fft.irfft(made, n=x.shape[1])


class Detection(nn.Module):
    """Losses of the rows that a mask selects, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.fc(x[:, 0])
        chosen = x[:, 0, 0] > 0
        losses = F.cross_entropy(scores, x[:, 0].argmax(1) % 8, reduction="none")
        target = torch.zeros_like(scores)
        target[chosen, 0] = 1.0
        return losses[chosen].sum() + F.binary_cross_entropy_with_logits(scores, target)


class Momentum(nn.Module):
    """MoCo: a second encoder that follows the first one inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data = k.data * 0.99 + q.data * 0.01
            key = self.key(x)
        return (F.normalize(self.query(x), dim=-1) * F.normalize(key, dim=-1)).sum(-1)


class Graph(nn.Module):
    """A GCN with a sparse adjacency, which PyTorch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        adjacency = torch.eye(x.shape[0]).roll(1, 0).to_sparse()
        h = torch.sparse.mm(adjacency, self.one(x[:, 0])).relu()
        return torch.sparse.mm(adjacency, self.two(h))


class Checks(nn.Module):
    """Checks that only raise, prints, and a check of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        assert torch.isfinite(h).all()
        if (x.abs() > 1e6).any():
            raise ValueError("too large")
        return h / float(h.detach().abs().max() + 1e-6)


class Block(nn.Module):
    """A layer of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.fc(x)))


class DroppedBlocks(nn.Module):
    """Layers of the user's own that Python's generator drops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.8:
                x = layer(x)
        return x


class Drops(nn.Module):
    """Layers of torch.nn that Python's generator drops, in a loop of forward's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            if random.random() < 0.8:
                x = x + layer(x).relu()
        return self.layers[3](x)


CASES = {kind.__name__: kind for kind in (Attention, Counts, Crops, Tutorial, Cells, Packed, Policy, Fourier, Detection,
                                          Momentum, Graph, Checks,
                                          DroppedBlocks, Drops)}


def _stepped(model: nn.Module, step: int) -> tuple[float, list[Tensor]]:
    """Seconds of a step, and its loss and gradients."""
    torch.manual_seed(step), random.seed(step)
    x = torch.randn(ROWS, 16 + step % 3, WIDTH)
    model.zero_grad()
    start = time.perf_counter()
    loss = model(x).sin().sum()
    loss.backward()
    seconds = time.perf_counter() - start
    return seconds, [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def _apart(got: list[Tensor], want: list[Tensor]) -> float:
    least = 0.01 * max(b.norm().item() for b in want)  # a gradient that is zero but for rounding has no digits
    return max((a - b).norm().item() / max(b.norm().item(), least) for a, b in zip(got, want, strict=True))


def measure(make: Callable[[], nn.Module], steps: int, with_compile: bool) -> list[str]:
    """The cells of a row."""
    torch.manual_seed(0)
    eager = make()
    ways = {"eager": eager, "onnxtrain": ORTModule(copy.deepcopy(eager))}
    if with_compile:
        ways["torch.compile"] = torch.compile(copy.deepcopy(eager))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    apart = 0.0
    for step in range(steps):
        results = {}
        for way, model in ways.items():
            took, results[way] = _stepped(model, step)
            seconds[way].append(took)
        apart = max(apart, _apart(results["onnxtrain"], results["eager"]))
    cells = [f"{statistics.median(seconds[way][5:]) * 1e3:.2f}" if way in ways else "-"
             for way in ("eager", "torch.compile", "onnxtrain")]
    cells += [f"{seconds[way][0]:.1f}" if way in ways else "-" for way in ("torch.compile", "onnxtrain")]
    counts = onnxtrain.stats(ways["onnxtrain"])
    return [*cells, str(counts["engine_steps"]), str(counts["fallback_steps"]), str(len(counts["graph_breaks"])),
            f"{apart:.0e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--without-compile", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| forward | eager, ms | torch.compile, ms | onnxtrain, ms | first step of torch.compile, s | of onnxtrain, s "
          "| engine | PyTorch | cuts | apart |")
    print("|" + " --- |" * 10)
    for name in arguments.names or CASES:
        torch._dynamo.reset()
        row = measure(CASES[name], arguments.steps, not arguments.without_compile)
        print("| " + " | ".join([(CASES[name].__doc__ or "").strip().rstrip(".").split("\n")[0], *row]) + " |", flush=True)


if __name__ == "__main__":
    main()
