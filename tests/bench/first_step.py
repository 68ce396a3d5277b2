"""The first step of GPT-2 124M with nothing kept, split: python tests/bench/first_step.py [--rounds 3]
and of real models in small beside torch.compile(backend="aot_eager"): ... --models [llama swin] [--rounds 3]
[--dynamic: beside aot_eager for any size, as ours is, too]
[--peers: beside eager, and torch.compile and ours with nothing kept and with what a process before has kept]
and of recurrent cells in a Python loop, split: ... --cells [steps, 100 by default]

Ours beside what its parts would cost by themselves, each in a fresh process that has imported everything: torch.export
and torch.onnx as anybody calls them (the proto of the weights, which we do not make, apart), and one eager step. The
goal is their sum and half a second. Nothing is kept from process to process but where a column says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
GOAL = 0.5  # seconds beyond the parts
MODELS = ("distilbert", "bert", "gpt2", "llama", "mixtral", "t5", "bart", "whisper", "vit", "swin", "convnext", "clip")
WAYS = ("aot_eager", "aot_eager dynamic", "ours")  # aot_eager's first graph is for one size; ours is for any
PEERS = ("eager", "compile", "compile kept", "aot_eager", "ours", "ours kept")
TIMES = 1.25  # of aot_eager's first step: the goal of a real model's


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


class Loop(torch.nn.Module):
    """A cell that Python calls at each step of a sequence, (batch, steps, 8) -> (batch, steps, 1)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell, self.out = getattr(torch.nn, kind)(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x):  # noqa: ANN001, ANN201
        state, results = None, []
        for step in range(x.size(1)):
            state = self.cell(x[:, step], state)
            results.append(self.out(state[0] if isinstance(state, tuple) else state))
        return torch.stack(results, 1)


def cell_once(kind: str, steps: int) -> dict[str, float]:
    """Seconds of the processor of the first forward, and of it by the clock what the export took."""
    from onnxtrain.ortmodule import ORTModule

    model, x = ORTModule(Loop(kind)), torch.randn(4, steps, 8)
    start = time.process_time()
    model(x)
    whole = time.process_time() - start
    (program,) = model._all_programs()[0][1]
    found = program.exported.seconds
    return {"forward": whole, "torch.export": found["torch_export"], "torch.onnx": found["torch_onnx"],
            "Dynamo and the rest": whole - found["torch_export"] - found["torch_onnx"]}


def compare_cells(steps: int, rounds: int) -> None:
    parts: tuple[str, ...] = ()
    for kind in ("LSTMCell", "GRUCell", "RNNCell"):
        rows = [in_a_process(f"{kind}:{steps}") for _ in range(rounds)]
        if not parts:
            parts = tuple(rows[0])
            print(f"| {steps} steps |", *(f"{part}, s |" for part in parts))
            print("| --- |", *("--- |" for _ in parts))
        print(f"| {kind} |", *(f"{statistics.median(row[part] for row in rows):.2f} |" for part in parts), flush=True)


def model_once(name: str, way: str) -> dict[str, float]:
    """Seconds of the first forward and backward of a model of transformers, by the clock and of the processor."""
    import torch._dynamo
    from transformers_zoo import ZOO

    from onnxtrain.ortmodule import ORTModule

    maker, attentions = ZOO[name]
    module, arguments = maker(attentions[0], 0.1)
    module.train()
    start, used = time.perf_counter(), time.process_time()
    kind = way.removesuffix(" kept")
    wraps = {"eager": lambda m: m, "compile": torch.compile, "ours": ORTModule}
    model = wraps[kind](module) if kind in wraps else torch.compile(
        module, backend="aot_eager", dynamic=True if kind.endswith("dynamic") else None)
    result = model(**arguments)
    (result.loss if getattr(result, "loss", None) is not None else result.logits_per_text.sum()).backward()
    return {"seconds": time.perf_counter() - start, "of the processor": time.process_time() - used}


def compare(names: list[str], rounds: int, ways: Sequence[str]) -> None:
    """All ways in turn, each in a fresh process."""
    others = [way for way in ways if way.startswith("aot_eager")]
    print("| model |", *(f"{way}, s |" for way in ways), *(f"ours / {way} |" for way in others), "of the processor |")
    print("| --- |", *("--- |" for _ in (*ways, *others, "of the processor")))
    found: dict[str, list[float]] = {way: [] for way in others}
    for name in names:
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        with tempfile.TemporaryDirectory() as kept:
            for way in ways:
                if way.endswith(" kept"):
                    in_a_process(f"{name}:{way}", kept)
            for _ in range(rounds):
                for way, results in rows.items():
                    results.append(in_a_process(f"{name}:{way}", kept if way.endswith(" kept") else ""))
        medians = {way: {key: statistics.median(row[key] for row in results) for key in results[0]}
                   for way, results in rows.items()}
        own, fixed = medians["ours"], medians["aot_eager"]
        for way in others:
            found[way].append(own["seconds"] / medians[way]["seconds"])
        print(f"| {name} |", *(f"{medians[way]['seconds']:.2f} |" for way in ways),
              *(f"{found[way][-1]:.2f} |" for way in others),
              f"{own['of the processor'] / fixed['of the processor']:.2f} |", flush=True)
    means = [f"{statistics.geometric_mean(ratios):.2f} of {way}" for way, ratios in found.items()]
    print(f"geometric means {' and '.join(means)} (goal {TIMES} of aot_eager)")


def in_a_process(kind: str, kept: str = "") -> dict[str, float]:
    """What the process prints. It reads exports and compiled code from the folder `kept`, or starts with none."""
    command = [sys.executable, "-W", "ignore", __file__, "--once", kind]
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, "ORTMODULE_CACHE_DIR": kept and f"{kept}/exports",
                       "TORCHINDUCTOR_CACHE_DIR": f"{kept or empty}/code"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.split("SPLIT")[1])


def once(kind: str) -> None:
    from workloads import GPT2

    import onnxtrain  # noqa: F401

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    if "Cell:" in kind:
        cell, _, steps = kind.partition(":")
        print("SPLIT", json.dumps(cell_once(cell, int(steps))))
        return
    if ":" in kind:
        print("SPLIT", json.dumps(model_once(*kind.split(":"))))
        return
    module, tokens = GPT2(), torch.randint(0, 50257, (4, 64))
    torch.ones(8, 8).requires_grad_(True).mm(torch.ones(8, 8)).sum().backward()  # torch's own start
    print("SPLIT", json.dumps({"ours": ours, "parts": parts, "eager": eager}[kind](module, tokens)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="*", choices=MODELS, help="beside aot_eager; none named: all of these")
    parser.add_argument("--dynamic", action="store_true", help="beside aot_eager with dynamic=True, too")
    parser.add_argument("--peers", action="store_true", help="beside eager and torch.compile, too, and from kept files")
    parser.add_argument("--cells", nargs="?", const=100, type=int, metavar="STEPS", help="loops of recurrent cells")
    args = parser.parse_args()
    if args.once:
        return once(args.once)
    if args.cells is not None:
        return compare_cells(args.cells, args.rounds)
    if args.models is not None:
        return compare(args.models or list(MODELS), args.rounds,
                       PEERS if args.peers else WAYS if args.dynamic else WAYS[::2])
    found: dict[str, list[dict[str, float]]] = {"ours": [], "parts": [], "eager": []}
    for _ in range(args.rounds):
        for kind, results in found.items():
            results.append(in_a_process(kind))
    medians = {kind: {part: statistics.median(r[part] for r in results) for part in results[0]}
               for kind, results in found.items()}
    for kind, row in medians.items():
        print(f"{kind:>6}: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in row.items()))
    allowed = medians["parts"]["torch_export"] + medians["parts"]["torch_onnx"] + GOAL + medians["eager"]["first step"]
    print(f"ours {medians['ours']['first step']:.2f} s; torch.export, torch.onnx, an eager step and {GOAL} s: "
          f"{allowed:.2f} s")


if __name__ == "__main__":
    main()
