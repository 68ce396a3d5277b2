"""Whole training steps against eager and torch.compile, in interleaved rounds of one run; medians and ratios.

    python tests/bench/step.py [--workload mlp|transformer] [--rounds 7] [--no-compile] [--markdown]
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "getting_started"))
from model import TransformerModel  # noqa: E402
import onnxtrain  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

warnings.filterwarnings("ignore")
WORDS = 28782  # of the whole of Wikitext-2


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, ...], Callable, int]:
    module = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10))
    batch = torch.randn(64, 784), torch.randint(0, 10, (64,))
    return module, batch, lambda m, x, y: F.cross_entropy(m(x), y), 200


def transformer() -> tuple[nn.Module, tuple[torch.Tensor, ...], Callable, int]:
    batch = torch.randint(0, WORDS, (35, 20)), torch.randint(0, WORDS, (700,))
    return TransformerModel(WORDS), batch, lambda m, x, y: F.cross_entropy(m(x).view(-1, WORDS), y), 3


WORKLOADS = {"mlp": mlp, "transformer": transformer}


class Peer:
    """One way to run a workload: its own copy of the module, plain SGD."""

    def __init__(self, name: str, module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.name = name
        self.model = wrap(copy.deepcopy(module))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.times: list[float] = []
        self.first = 0.0

    def step(self, batch: tuple[torch.Tensor, ...], loss: Callable) -> None:
        self.optimizer.zero_grad()
        loss(self.model, *batch).backward()
        self.optimizer.step()

    def timed(self, batch: tuple[torch.Tensor, ...], loss: Callable, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self.step(batch, loss)
        return (time.perf_counter() - start) / steps


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def run(name: str, rounds: int, with_compile: bool) -> list[tuple[str, str, float, float, float]]:
    torch.manual_seed(0)
    module, batch, loss, steps = WORKLOADS[name]()
    peers = [Peer("eager", module, lambda m: m), Peer("onnxtrain", module, ORTModule)]
    if with_compile:
        peers.insert(1, Peer("torch.compile", module, torch.compile))
    for peer in peers:
        peer.first = peer.timed(batch, loss, 1)
        peer.timed(batch, loss, 2)
    for _ in range(rounds):
        for peer in peers:
            peer.times.append(peer.timed(batch, loss, steps))
    ours = next(peer for peer in peers if peer.name == "onnxtrain")
    counts = onnxtrain.stats(ours.model)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    session = next(iter(ours.model._programs.values()))[0].session.stats()
    print(f"{name}: first step {ours.first:.2f} s, of which export {counts['export_seconds']:.2f}, build "
          f"{session['build_seconds'] + counts['build_seconds']:.3f}; slab {session['slab_bytes'] / 2**20:.1f} MiB "
          f"(lower bound {session['slab_lower_bound'] / 2**20:.1f})")
    base = median(peers[0].times)
    return [(name, p.name, 1e3 * median(p.times), base / median(p.times), p.first) for p in peers]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    rows = [row for name in args.workload or WORKLOADS for row in run(name, args.rounds, not args.no_compile)]
    if args.markdown:
        print("| workload | peer | ms a step | eager / peer | first step, s |\n| --- | --- | --- | --- | --- |")
    for workload, peer, ms, ratio, first in rows:
        if args.markdown:
            print(f"| {workload} | {peer} | {ms:.2f} | {ratio:.2f} | {first:.1f} |")
        else:
            print(f"{workload:<14}{peer:<16}{ms:>10.2f} ms a step{ratio:>8.2f}x eager{first:>8.1f} s first step")


if __name__ == "__main__":
    main()
