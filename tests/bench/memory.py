"""Memory levels and budgets of GPT-2 with its loss inside and dropout: planned slab, time of a step, the
largest relative error of a gradient, peak of the process.

    python tests/bench/memory.py [--batch 4] [--length 512] [--rounds 5] [--layers 12] [--budgets 60,40,25,15]

Configurations take turns: each round times one step of each, after one that is not timed; the median of the rounds is
shown against level 0's. The peak is of a process of its own a configuration (VmHWM), with parameters and gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule

WORDS = 50257


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ratio: float) -> None:
        super().__init__()
        self.heads, self.ratio = heads, ratio
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(ratio)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.ln1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.ratio if self.training else 0.0)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.proj(F.gelu(self.fc(self.ln2(x)), approximate="tanh")))


class GPT2(nn.Module):
    """124 million parameters at 12 layers, tied embeddings; forward gives the loss."""

    def __init__(self, layers: int, width: int = 768, heads: int = 12, ratio: float = 0.1) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(1024, width)
        self.drop, self.norm = nn.Dropout(ratio), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, ratio) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def made(name: str, layers: int) -> ORTModule:
    """A configuration: "stored" (level 0 with stored scores), "level 1", "60%"."""
    torch.manual_seed(0)
    model = ORTModule(GPT2(layers).train())
    if name.startswith("level"):
        model._runtime.memory_optimization_level = int(name.split()[1])
    elif name.endswith("%"):
        model._runtime.memory_budget = int(name[:-1]) / 100
    return model


def step(model: ORTModule, batch: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Loss and seconds of one forward and backward."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    start = time.perf_counter()
    loss = model(*batch)
    loss.backward()
    return loss.item(), time.perf_counter() - start


def peak(name: str, args: argparse.Namespace) -> float:
    """MiB of a process that runs three steps of one configuration."""
    command = [sys.executable, __file__, "--only", name, "--batch", str(args.batch), "--length", str(args.length),
               "--layers", str(args.layers)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=dict(os.environ)).stdout
    return float(lines.split()[-1])


def batch_of(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return (torch.randint(0, WORDS, (args.batch, args.length)), torch.randint(0, WORDS, (args.batch, args.length)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 4), ("length", 512), ("rounds", 5), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budgets", default="60,40,25,15")
    parser.add_argument("--only", help="one configuration: three steps, then the peak of the process in MiB")
    parser.add_argument("--no-peaks", action="store_true")
    args = parser.parse_args()
    batch = batch_of(args)
    if args.only:
        model = made(args.only, args.layers)
        for _ in range(3):
            step(model, batch)
        status = Path("/proc/self/status").read_text()
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        return
    names = ["level 0", "level 1", "level 2", *(f"{budget}%" for budget in args.budgets.split(",") if budget)]
    models = {name: made(name, args.layers) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    grads: dict[str, list[torch.Tensor]] = {}
    for _ in range(args.rounds):
        for name, model in models.items():
            step(model, batch)
            times[name].append(step(model, batch)[1])
            if len(times[name]) == 1:
                grads[name] = [p.grad.clone() for p in model.parameters()]
            model.zero_grad(set_to_none=True)
    base = onnxtrain.stats(models["level 0"])["slab_bytes"]
    first = statistics.median(times["level 0"])
    print(f"{'':<10}{'slab MiB':>10}{'of level 0':>12}{'kept MiB':>10}{'ms':>9}{'time':>8}{'error':>9}{'peak MiB':>10}")
    for name in names:
        slab, seconds = onnxtrain.stats(models[name])["slab_bytes"], statistics.median(times[name])
        kept = sum(program.totals()["kept_bytes"] for _, known in models[name]._all_programs() for program in known)
        error = max([((a - b).norm() / b.norm()).item() for a, b in zip(grads[name], grads["level 0"])])
        most = "" if args.no_peaks else f"{peak(name, args):10.0f}"
        print(f"{name:<10}{slab / 2**20:10.1f}{slab / base:12.1%}{kept / 2**20:10.1f}{seconds * 1e3:9.0f}"
              f"{seconds / first - 1:+8.1%}{error:9.1e}{most}")


if __name__ == "__main__":
    main()
