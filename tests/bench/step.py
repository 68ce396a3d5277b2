"""Whole training steps against eager and torch.compile, in interleaved rounds of one run; medians and ratios.

    python tests/bench/step.py [--workload mlp|transformer|cnn|resnet18|gpt2|bert|llama]... [--rounds 7] [--no-compile]
    python tests/bench/step.py --in-backward [--workload ...] [--bf16] [--rounds 7] [--no-memory]
    python tests/bench/step.py --precisions [--workload ...] [--rounds 7]
    python tests/bench/step.py --all [--workload ...] [--threads N] [--no-memory] [--no-compile] [--markdown]

--all is the table of step_table.py: float32 and bf16 rows with the optimizers that the workloads are known with, the loss
inside and outside the module, eager under jemalloc, GFLOP/s and share of the peak, memory; llama is in it only where
--workload names it. With ONNXTRAIN_ISA=avx2 the whole process, torch and its libraries too, is held down to AVX2.

--precisions compares torch.set_float32_matmul_precision("highest"), "high" and "medium", ours and eager at each.

--in-backward compares FusedAdam's step after backward with the same one in backward (onnxtrain.optim.step_in_backward).

Prints for ours the first step (a process that has imported everything) split into export and build, the build for a new
size of a dynamic dim, and the planned slab; and for eager and ours the peak resident memory of five steps above what
the process held before them, for ours after export, each in a process of its own (--no-memory leaves that out).
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

# Read by ATen and TorchInductor, MKL, and torch's oneDNN, when they are loaded.
if os.environ.get("ONNXTRAIN_ISA") == "avx2":
    os.environ.update(ATEN_CPU_CAPABILITY="avx2", MKL_ENABLE_INSTRUCTIONS="AVX2", ONEDNN_MAX_CPU_ISA="AVX2")

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from step_table import WARM_UP, after_export, print_table, resident, serve  # noqa: E402
from step_table import print_peak as print_peak_beyond  # noqa: E402
from workloads import WORKLOADS, Workload  # noqa: E402

import onnxtrain  # noqa: E402
from onnxtrain.optim import FusedAdam, step_in_backward  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

warnings.filterwarnings("ignore")


class Peer:
    """One way to run a workload: its own copy of the module, plain SGD."""

    def __init__(self, name: str, module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.name = name
        self.model = wrap(copy.deepcopy(module))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.times: list[float] = []
        self.first = 0.0

    def step(self, batch: tuple[torch.Tensor, ...], work: Workload) -> None:
        self.optimizer.zero_grad()
        work.loss(self.model, *batch).backward()
        self.optimizer.step()

    def timed(self, work: Workload, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self.step(work.batch, work)
        return (time.perf_counter() - start) / steps


STEPS = ("after", "within")  # backward


class Adam(Peer):
    """Ours by FusedAdam, whose step is after backward or within it."""

    def __init__(self, step: str, module: nn.Module, bf16: bool) -> None:
        super().__init__(step, module, ORTModule)
        self.bf16 = bf16
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-4)
        if step == "within":
            step_in_backward(self.optimizer, self.model)

    def step(self, batch: tuple[torch.Tensor, ...], work: Workload) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = work.loss(self.model, *batch)
        loss.backward()
        self.optimizer.step()


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


# ---- memory ----


def forget_peak() -> None:
    """What is free goes back to the system, and the high-water mark starts from now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def print_peak(name: str, peer_name: str, bf16: bool) -> None:
    """In a process of its own: MiB that five steps take above what was held before them, for ours after export."""
    torch.manual_seed(0)
    work = WORKLOADS[name]()
    before = [0.0]

    def start() -> None:
        forget_peak()
        before[0] = resident("VmRSS")

    if peer_name in STEPS:
        peer = Adam(peer_name, work.module, bf16)
    else:
        peer = Peer(peer_name, work.module, ORTModule if peer_name == "onnxtrain" else lambda m: m)
    del work.module.__dict__["_modules"]  # the peer has its own copy
    start()
    with after_export(start):
        for _ in range(5):
            peer.step(work.batch, work)
    print(f"PEAK {resident('VmHWM') - before[0]:.0f}")


def peak(name: str, peer: str, *options: str) -> float:
    command = [sys.executable, __file__, "--workload", name, "--peak-of", peer, *options]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.split("PEAK")[1])


# ---- time ----


def run(name: str, rounds: int, with_compile: bool, with_memory: bool) -> list[tuple[str, str, float, float, float]]:
    torch.manual_seed(0)
    work = WORKLOADS[name]()
    peers = [Peer("eager", work.module, lambda m: m), Peer("onnxtrain", work.module, ORTModule)]
    if with_compile:
        peers.insert(1, Peer("torch.compile", work.module, torch.compile))
    for peer in peers:
        peer.first = peer.timed(work, 1)
        peer.timed(work, WARM_UP)
    for _ in range(rounds):
        for peer in peers:
            peer.times.append(peer.timed(work, work.steps))
    ours = peers[-1]
    counts = onnxtrain.stats(ours.model)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    session = ours.model._all_programs()[0][1][0].session
    stats = session.stats()
    ours.step(work.resized, work)
    resized = session.stats()
    print(f"{name}: first step {ours.first:.2f} s, of which export {counts['export_seconds']:.2f}, build "
          f"{stats['build_seconds'] + counts['build_seconds']:.3f}; build for a new size "
          f"{1e3 * (resized['build_seconds'] - stats['build_seconds']):.1f} ms; slab {stats['slab_bytes'] / 2**20:.1f} "
          f"MiB (lower bound {stats['slab_lower_bound'] / 2**20:.1f})")
    if with_memory:
        print(f"{name}: peak resident memory of five steps: eager {peak(name, 'eager'):.0f} MiB, onnxtrain "
              f"{peak(name, 'onnxtrain'):.0f} MiB")
    base = median(peers[0].times)
    return [(name, p.name, 1e3 * median(p.times), base / median(p.times), p.first) for p in peers]


def run_in_backward(name: str, rounds: int, bf16: bool, with_memory: bool) -> None:
    """FusedAdam's step after backward and in it, in interleaved rounds; what they give is compared as well."""
    torch.manual_seed(0)
    work = WORKLOADS[name]()
    Adam(STEPS[0], work.module, bf16).timed(work, WARM_UP)  # what it finds of large products holds for the others
    peers = [Adam(step, work.module, bf16) for step in STEPS]
    for turn in range(rounds + 1):
        for peer in peers:
            torch.manual_seed(turn)  # the same dropout
            took = peer.timed(work, work.steps if turn else 2)
            if turn:
                peer.times.append(took)
    assert all(torch.equal(p, q) for p, q in zip(*(peer.model.parameters() for peer in peers), strict=True))
    for peer in peers:
        session = peer.model._all_programs()[0][1][0].session.stats()
        memory = f", peak of five steps {peak(name, peer.name, *['--bf16'] * bf16):.0f} MiB" if with_memory else ""
        print(f"{name} {'bf16' if bf16 else 'float32'}, step {peer.name}: {1e3 * median(peer.times):.2f} ms, "
              f"slab {session['slab_bytes'] / 2**20:.1f} MiB, outputs and gradients "
              f"{session['pool_peak_bytes'] / 2**20:.1f}{memory}")


def run_precisions(name: str, rounds: int) -> None:
    """Every step of a round under another torch.set_float32_matmul_precision(); losses of a first step side by side."""
    torch.manual_seed(0)
    work = WORKLOADS[name]()
    peers = {(kind, precision): Peer(precision, work.module, ORTModule if kind == "onnxtrain" else lambda m: m)
             for kind in ("eager", "onnxtrain") for precision in ("highest", "high", "medium")}
    losses = {}
    for turn in range(rounds + 2):
        for key, peer in peers.items():
            torch.set_float32_matmul_precision(peer.name)
            if turn == 0:
                torch.manual_seed(1)
                losses[key] = work.loss(peer.model, *work.batch).item()
            took = peer.timed(work, work.steps)
            if turn > 1:
                peer.times.append(took)
    torch.set_float32_matmul_precision("highest")
    for (kind, precision), peer in peers.items():
        exact = median(peers[kind, "highest"].times)
        print(f"{name:<14}{kind:<11}{precision:<9}{1e3 * median(peer.times):>9.2f} ms a step"
              f"{exact / median(peer.times):>6.2f}x highest   first loss {losses[kind, precision]:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--all", action="store_true", help="the whole table; --workload keeps some of its rows")
    parser.add_argument("--precisions", action="store_true",
                        help="torch.set_float32_matmul_precision() at each setting")
    parser.add_argument("--in-backward", action="store_true", help="FusedAdam's step after backward and within it")
    parser.add_argument("--bf16", action="store_true", help="with --in-backward: under autocast")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads, for every peer")
    parser.add_argument("--serve", metavar="ROW", help=argparse.SUPPRESS)
    parser.add_argument("--beyond", metavar="ROW", help=argparse.SUPPRESS)
    parser.add_argument("--peak-of", choices=("eager", "onnxtrain", *STEPS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.serve:
        return serve(args.serve)
    if args.beyond:
        return print_peak_beyond(args.beyond, args.peak_of, forget_peak)
    if args.all:
        return print_table(args)
    names = args.workload or ["mlp", "transformer", "cnn"]
    if args.peak_of:
        return print_peak(names[0], args.peak_of, args.bf16)
    if args.precisions:
        for name in names:
            run_precisions(name, args.rounds)
        return None
    if args.in_backward:
        for name in args.workload or ["gpt2"]:
            run_in_backward(name, args.rounds, args.bf16, not args.no_memory)
        return None
    rows = [row for name in names for row in run(name, args.rounds, not args.no_compile, not args.no_memory)]
    if args.markdown:
        print("| workload | peer | ms a step | eager / peer | first step, s |\n| --- | --- | --- | --- | --- |")
    for workload, peer, ms, ratio, first in rows:
        if args.markdown:
            print(f"| {workload} | {peer} | {ms:.2f} | {ratio:.2f} | {first:.1f} |")
        else:
            print(f"{workload:<14}{peer:<16}{ms:>10.2f} ms a step{ratio:>8.2f}x eager{first:>8.1f} s first step")


if __name__ == "__main__":
    main()
