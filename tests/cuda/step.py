"""Step times on a GPU: eager, torch.compile and ORTModule, medians of interleaved rounds, all with AdamW(fused=True).

    python tests/cuda/step.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import smoke  # noqa: E402

from onnxtrain import _C  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402


def workloads() -> dict[str, tuple[nn.Module, torch.Tensor, int]]:
    """Name: module, input, classes. The labels are drawn per step."""
    smoke.WIDTH, smoke.HEADS, smoke.HIDDEN, smoke.LENGTH, smoke.VOCABULARY = 768, 12, 3072, 512, 32000
    language = smoke.Language(0.1)
    mlp = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10))
    return {"mlp": (mlp, torch.randn(64, 784), 10), "transformer": (language, torch.randint(0, 32000, (512, 16)), 32000)}


def stepper(module: nn.Module, x: torch.Tensor, classes: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4, fused=True)
    labels = torch.randint(0, classes, (x.shape[0] if x.dim() == 2 and x.is_floating_point() else x.numel(),), device=x.device)

    def step() -> None:
        optimizer.zero_grad()
        scores = module(x)
        nn.functional.cross_entropy(scores.reshape(-1, classes), labels).backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def main(rounds: int) -> None:
    _C.set_graphs(True)
    for name, (module, x, classes) in workloads().items():
        module, x = module.cuda(), x.cuda()
        steps = {"eager": stepper(copy.deepcopy(module), x, classes),
                 "compile": stepper(torch.compile(copy.deepcopy(module)), x, classes),
                 "onnxtrain": stepper(ORTModule(copy.deepcopy(module)), x, classes)}
        for step in steps.values():
            for _ in range(5):
                step()
        times = {kind: [] for kind in steps}
        for _ in range(rounds):
            for kind, step in steps.items():
                times[kind].append(milliseconds(step))
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        ratios = " ".join(f"{kind}/onnxtrain {medians[kind] / medians['onnxtrain']:.2f}" for kind in ("eager", "compile"))
        print(name, " ".join(f"{kind} {value:.3f} ms" for kind, value in medians.items()), ratios)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    main(parser.parse_args().rounds)
