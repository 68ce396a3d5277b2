"""The first step of GPT-2 124M with nothing kept, split: python tests/bench/first_step.py [--rounds 3]

Ours beside what its parts would cost by themselves, each in a fresh process that has imported everything: torch.export
and torch.onnx as anybody calls them (the proto of the weights, which we do not make, apart), and one eager step. The
goal is their sum and half a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
GOAL = 0.5  # seconds beyond the parts


def ours(module, tokens) -> dict[str, float]:  # noqa: ANN001
    """Seconds of each part of the first step, from the call of ORTModule to the gradients; and of the second."""
    from onnxtrain.ortmodule import ORTModule

    start = time.perf_counter()
    model = ORTModule(module)
    loss = model(tokens, tokens)
    forward = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    for parameter in module.parameters():
        parameter.grad = None
    model(tokens, tokens).backward()
    second = time.perf_counter() - end
    (program,) = model._all_programs()[0][1]
    parts = dict(program.exported.seconds)
    export = parts.pop("total")
    build = program.totals()["build_seconds"]
    return {**parts, "rest of export": export - sum(parts.values()), "load": program.build_seconds,
            "passes, kernels, plan": build, "forward and wrapping": forward - start - export - program.build_seconds
            - build, "backward": end - forward, "first step": end - start, "second step": second}


def parts(module, tokens) -> dict[str, float]:  # noqa: ANN001
    """torch.export and torch.onnx by themselves."""
    import torch

    auto = torch.export.Dim.AUTO
    start = time.perf_counter()
    program = torch.export.export(module, (tokens, tokens), strict=False, dynamic_shapes=({0: auto, 1: auto},) * 2)
    traced = time.perf_counter()
    torch.onnx.export(program, opset_version=20, optimize=False, verbose=False)
    return {"torch_export": traced - start, "torch_onnx": time.perf_counter() - traced}


def eager(module, tokens) -> dict[str, float]:  # noqa: ANN001
    start = time.perf_counter()
    module(tokens, tokens).backward()
    return {"first step": time.perf_counter() - start}


def once(kind: str) -> None:
    import torch
    from workloads import GPT2

    import onnxtrain  # noqa: F401

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    module, tokens = GPT2(), torch.randint(0, 50257, (4, 64))
    torch.ones(8, 8).requires_grad_(True).mm(torch.ones(8, 8)).sum().backward()  # torch's own start
    print("SPLIT", json.dumps({"ours": ours, "parts": parts, "eager": eager}[kind](module, tokens)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", choices=("ours", "parts", "eager"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        return once(args.once)
    found: dict[str, list[dict[str, float]]] = {"ours": [], "parts": [], "eager": []}
    for _ in range(args.rounds):
        for kind, results in found.items():
            command = [sys.executable, "-W", "ignore", __file__, "--once", kind]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            results.append(json.loads(output.split("SPLIT")[1]))
    medians = {kind: {part: statistics.median(r[part] for r in results) for part in results[0]}
               for kind, results in found.items()}
    for kind, row in medians.items():
        print(f"{kind:>6}: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in row.items()))
    allowed = medians["parts"]["torch_export"] + medians["parts"]["torch_onnx"] + GOAL + medians["eager"]["first step"]
    print(f"ours {medians['ours']['first step']:.2f} s; torch.export, torch.onnx, an eager step and {GOAL} s: "
          f"{allowed:.2f} s")


if __name__ == "__main__":
    main()
