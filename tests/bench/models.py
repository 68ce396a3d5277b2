"""Training steps of the models of model_zoo.py: eager, eager under jemalloc, torch.compile and onnxtrain.

    python tests/bench/models.py [--only NAME]... [--rounds 5] [--threads N] [--no-compile] [--no-jemalloc] [--bf16]
                                 [--clock wall|processor] [--markdown] [--below R]

Each peer of a model is a process of its own that waits for the number of steps to run, so that one computes at a time.
A round has a turn of every peer, in an order that rotates; a turn is one step that is not timed and then as many as
fill TURN seconds. Steps have batches of their own, AdamW of the peer's fused kind, and dropout where the model has it.
A row has the median of each peer's turns, the ratio of the better of eager and torch.compile to ours, first steps (ours
exports; torch.compile finds what its cache has kept), and the most memory that the process held in its timed steps
beyond what it held before it made the model.

--only takes the models whose name begins with NAME. --clock processor counts the time of the process, all threads, in
place of the wall's: with --threads 1 it is the step's own time on a machine that others use. --below R exits with 1 if
a ratio is under R.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from model_zoo import MODELS
from step_table import WRAPS, geometric_mean, jemalloc, make_optimizer, resident

import onnxtrain

PEERS = {"eager": "eager", "eager, jemalloc": "eager", "torch.compile": "torch.compile", "onnxtrain": "onnxtrain"}
WARM_UP = 8  # steps: kernels of the largest products compete in the engine's first ones
TURN = 0.5  # seconds
BATCHES = 4


# ---- a peer's process ----


def serve(name: str, kind: str, bf16: bool) -> None:
    """Answers each line of the input, a number of steps, with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    idle = resident("VmRSS")
    torch.manual_seed(0)
    work = MODELS[name]()
    batches = [work.batch() for _ in range(BATCHES)]
    os.environ["ORTMODULE_OUTPUTS"] = work.outputs
    model = WRAPS[kind](work.module.train())
    optimizer = make_optimizer("adamw", list(model.parameters()), kind == "onnxtrain")
    loss, done = torch.tensor(0.0), 0

    def step() -> None:
        nonlocal loss, done
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = work.loss(model, *batches[done % BATCHES])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            step()
        times = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
        answer = {clock: seconds / int(line) for clock, seconds in times.items()}
        answer.update(loss=loss.item(), memory=resident("VmHWM") - idle)
        if done == 1 + WARM_UP:  # the first steps compile, export and measure
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        if kind == "onnxtrain":
            counts = onnxtrain.stats(model)
            answer["fallback"] = counts["reasons"] if counts["fallback_steps"] else {}
        print(json.dumps(answer), file=answers, flush=True)


class Peer:
    """A process of serve()."""

    def __init__(self, model: str, name: str, args: argparse.Namespace, threads: int) -> None:
        self.name, self.clock = name, args.clock
        preloaded = {"LD_PRELOAD": str(jemalloc())} if name == "eager, jemalloc" else {}
        self.errors = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--serve", model, PEERS[name], *["--bf16"] * args.bf16,
             "--threads", str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "ORTMODULE_CACHE_DIR": "", **preloaded})
        self.times: list[float] = []
        self.first, self.loss, self.memory = 0.0, 0.0, 0.0
        self.fallback: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        assert self.process.stdout
        if self.process.stdout.readline() != "ready\n":
            self.fail()

    def fail(self) -> None:
        self.process.wait()
        self.errors.seek(0)
        errors = self.errors.read().strip().splitlines()
        raise RuntimeError(f"{self.name}: {errors[-1] if errors else 'no answer'}")

    def run(self, steps: int) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        print(steps, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            self.fail()
        answer = json.loads(line)
        self.memory, self.fallback = answer["memory"], answer.get("fallback", {})
        return answer

    def start(self) -> None:
        answer = self.run(1)
        self.first, self.loss = answer["wall"], answer["loss"]
        self.run(WARM_UP)

    def turn(self) -> None:
        steps = max(1, math.ceil(TURN / self.run(1)[self.clock]))
        self.times.append(self.run(steps)[self.clock])

    def close(self) -> None:
        self.process.communicate()
        self.errors.close()


# ---- rows ----


def measure(model: str, args: argparse.Namespace, threads: int) -> dict[str, Peer]:
    """All peers of one model, in turns. A peer that fails is said and left out; ours must run."""
    names = [name for name in PEERS if not (name == "torch.compile" and args.no_compile)
             and not (name == "eager, jemalloc" and (args.no_jemalloc or not jemalloc()))]
    peers = {name: Peer(model, name, args, threads) for name in names}
    try:
        for peer in peers.values():
            peer.wait_until_ready()
        for name, peer in list(peers.items()):
            try:
                peer.start()
            except RuntimeError as error:
                print(f"{model}: {error}", flush=True)
                peers.pop(name).close()
        if {"eager", "onnxtrain"} <= set(peers):
            for turn in range(args.rounds):
                order = list(peers.values())
                for i in range(len(order)):
                    order[(turn + i) % len(order)].turn()
    finally:
        for peer in peers.values():
            peer.close()
    return peers


def print_row(model: str, peers: dict[str, Peer], markdown: bool) -> float:
    """Prints the row, and gives the ratio of the better peer's time to ours; 0 without one of them."""
    if not {"eager", "onnxtrain"} <= set(peers):
        return 0.0
    medians = {name: statistics.median(peer.times) for name, peer in peers.items()}
    ratio = min(medians[name] for name in ("eager", "torch.compile") if name in medians) / medians["onnxtrain"]
    cells = [model]
    for values, form in ((medians, lambda name: f"{1e3 * medians[name]:.1f}"),
                         (peers, lambda name: f"{peers[name].first:.1f}"),
                         (peers, lambda name: f"{peers[name].memory:.0f}")):
        shown = [form(name) if name in values else "-" for name in PEERS]
        cells += [*shown, f"{ratio:.2f}"] if values is medians else [" ".join(shown)]
    print("| " + " | ".join(cells) + " |" if markdown else
          "{:<24}{:>10}{:>10}{:>10}{:>10}{:>7}   {:<24}{}".format(*cells), flush=True)
    ours, eager = peers["onnxtrain"], peers["eager"]
    if ours.fallback:
        print(f"{model}: steps of onnxtrain ran in PyTorch: {ours.fallback}", flush=True)
    if abs(ours.loss - eager.loss) > 0.1 * abs(eager.loss):
        print(f"{model}: the first loss is {ours.loss:.4f}, eager's is {eager.loss:.4f}", flush=True)
    return ratio


HEAD = ("model", *(f"{name}, ms" for name in PEERS), "ratio", "first steps, s", "memory, MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="torch.set_num_threads, for every peer")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-jemalloc", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="under autocast to bfloat16")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--below", type=float, default=0.0, metavar="R")
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.serve:
        serve(*args.serve, args.bf16)
        return 0
    threads = torch.get_num_threads()
    names = [name for name in MODELS if not args.only or any(name.startswith(begin) for begin in args.only)]
    if not names:
        parser.error(f"no model's name begins so; there are {', '.join(MODELS)}")
    print(f"{threads} threads, torch {torch.__version__}, {'bfloat16' if args.bf16 else 'float32'}, {args.rounds} rounds, "
          f"{args.clock} time, medians; first steps and memory in the order of the peers")
    print("| " + " | ".join(HEAD) + " |\n|" + " --- |" * len(HEAD) if args.markdown else " | ".join(HEAD))
    ratios = {name: print_row(name, measure(name, args, threads), args.markdown) for name in names}
    known = [ratio for ratio in ratios.values() if ratio]
    if known:
        print(f"{len(known)} of {len(names)} models: {geometric_mean(known):.2f}x the better of eager and torch.compile "
              f"in the geometric mean; least {min(known):.2f}x")
    slow = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio < args.below]
    if slow:
        print(f"below {args.below}: {', '.join(slow)}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
