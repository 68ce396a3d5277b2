"""The table of `step.py --all`: whole steps of every peer in interleaved rounds, rates, shares of the machine's peak,
memory.

Peers of a row take turns in one run, each with a step that is not timed, as the peak has a product; eager under
jemalloc is a process of its own that steps when it is told to. Rates count the operations of products, convolutions and
attention that torch's FlopCounterMode finds in an eager step; the peak is torch's own on a square product of 2048, in
the row's dtype, measured before and after each turn: a turn's share is of the mean of both, as a shared machine's speed
goes by the minute, and a row's share is the median of its turns'. A peer whose step takes longer than PATIENCE, as
torch's in bfloat16 does where the processor has no such products, is timed in its second step and has no other turn;
these rows are measured only where --workload names theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import glob
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode
from workloads import LOSS_INSIDE, WORKLOADS, Workload, workload

import onnxtrain
from onnxtrain import _C
from onnxtrain.optim import SGD, AdamWMode, FusedAdam
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._runner import GraphRunner

STEP = Path(__file__).with_name("step.py")


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    optimizer: str  # "sgd" or "adamw"
    bf16: bool = False
    loss_inside: bool | None = None  # None: where the workload has it

    def __str__(self) -> str:
        inside = self.name in LOSS_INSIDE if self.loss_inside is None else self.loss_inside
        return f"{self.name}{' bf16' if self.bf16 else ''}, {self.optimizer}, loss {'inside' if inside else 'outside'}"


FLOAT32 = [Row("mlp", "sgd"), Row("transformer", "sgd"), Row("bert", "adamw"), Row("resnet18", "sgd"),
           Row("gpt2", "adamw")]
BF16 = [Row(name, "adamw", bf16=True) for name in ("transformer", "bert", "gpt2")]
OTHER_LOSS = [dataclasses.replace(row, loss_inside=row.name not in LOSS_INSIDE) for row in (*FLOAT32, *BF16)]
ASKED = [Row("llama", "adamw"), Row("llama", "adamw", bf16=True)]  # only where --workload names them
PATIENCE = 4.0  # seconds: no step, and no product for the peak, that takes longer is waited for again
LEAST = {"peer": 1.4, "row": 1.1, "mlp": 1.2, "jemalloc": 1.15, "bf16": 1.5, "share": 0.75, "memory": 0.5}


def make_optimizer(kind: str, params: list[nn.Parameter], ours: bool) -> torch.optim.Optimizer:
    """The fused optimizer of each side."""
    if kind == "sgd":
        return SGD(params, lr=0.01) if ours else torch.optim.SGD(params, lr=0.01, fused=True)
    if ours:
        return FusedAdam(params, lr=1e-4, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH, weight_decay=0.01)
    return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True)


class LocalPeer:
    """One way to run a row's workload in this process, with its own copy of the module."""

    def __init__(self, row: Row, work: Workload, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.row, self.work = row, work
        self.model = wrap(copy.deepcopy(work.module))
        self.optimizer = make_optimizer(row.optimizer, list(self.model.parameters()), wrap is ORTModule)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.row.bf16):
            loss = self.work.loss(self.model, *self.work.batch)
        loss.backward()
        self.optimizer.step()

    def timed(self, steps: int) -> float:
        """Seconds a step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - start) / steps

    def held(self) -> int:
        """Bytes of gradients and of the optimizer's state."""
        tensors = [p.grad for p in self.model.parameters() if p.grad is not None]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def close(self) -> None:
        pass


class RemotePeer:
    """Eager in a process with another allocator. It answers each line, a number of steps, with seconds a step."""

    def __init__(self, row: Row, library: str, threads: int) -> None:
        command = [sys.executable, str(STEP), "--threads", str(threads), "--serve", encode(row)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "LD_PRELOAD": library})

    def timed(self, steps: int) -> float:
        assert self.process.stdin and self.process.stdout
        print(steps, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def encode(row: Row) -> str:
    return f"{row.name}:{row.optimizer}:{int(row.bf16)}:{'' if row.loss_inside is None else int(row.loss_inside)}"


def decode(text: str) -> Row:
    name, optimizer, bf16, inside = text.split(":")
    return Row(name, optimizer, bf16 == "1", None if inside == "" else inside == "1")


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {"eager": lambda m: m, "torch.compile": torch.compile,
                                                      "onnxtrain": ORTModule}


def make_work(row: Row) -> Workload:
    torch.manual_seed(0)
    return workload(row.name, row.loss_inside)


def serve(text: str) -> None:
    """In a process of its own: what RemotePeer asks for, until its input ends."""
    row = decode(text)
    peer = LocalPeer(row, make_work(row), WRAPS["eager"])
    for line in sys.stdin:
        print(peer.timed(int(line)), flush=True)


def jemalloc() -> str | None:
    """Path of libjemalloc2's library, where it is installed."""
    found = [path for folder in ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/homebrew/lib") for path in
             sorted(glob.glob(f"{folder}/libjemalloc.so.2") + glob.glob(f"{folder}/*-linux-gnu/libjemalloc.so.2"))]
    return found[0] if found else None


# ---- memory ----


def resident(field: str) -> float:
    """MiB of VmRSS or of its high-water mark VmHWM."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 1024


@contextlib.contextmanager
def after_export(start: Callable[[], None]) -> Iterator[None]:
    """Calls `start` whenever a module was exported and its program built."""
    build = GraphRunner._program

    def build_then_start(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        program = build(*args, **kwargs)
        start()
        return program

    GraphRunner._program = build_then_start
    try:
        yield
    finally:
        GraphRunner._program = build


def print_peak(text: str, peer_name: str, forget_peak: Callable[[], None]) -> None:
    """In a process of its own: MiB that five steps take beyond parameters, gradients and optimizer state."""
    row = decode(text)
    work = make_work(row)
    before = [0.0]

    def start() -> None:
        forget_peak()
        before[0] = resident("VmRSS") - peer.held() / 2**20  # a module may be exported again in its second step

    peer = LocalPeer(row, work, WRAPS[peer_name])
    del work.module.__dict__["_modules"]  # the peer has its own copy
    start()
    with after_export(start):
        for taken in range(5):
            if peer.timed(1) > PATIENCE and taken:
                break  # the second step holds gradients and state beside all else, as any later one
    print(f"PEAK {resident('VmHWM') - before[0] - peer.held() / 2**20:.0f}")


def peak_memory(row: Row, peer: str, threads: int) -> float:
    command = [sys.executable, str(STEP), "--threads", str(threads), "--beyond", encode(row), "--peak-of", peer]
    environment = {**os.environ, "ORTMODULE_CACHE_DIR": ""}  # each process exports: what that takes is left out
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return float(output.split("PEAK")[1])


# ---- rates ----


def count_operations(row: Row) -> float:
    """Multiplications and additions of one eager step."""
    peer = LocalPeer(row, make_work(row), WRAPS["eager"])
    with FlopCounterMode(display=False) as counter:
        peer.step()
    return float(counter.get_total_flops())


def multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 products that torch uses."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Peak:
    """Rate of torch's square product, GFLOP/s, as steps are timed: each sample's mean, and the median of samples."""

    AT_ONCE = 8  # products: about as long as a step

    def __init__(self, dtype: torch.dtype) -> None:
        self.a, self.b = (torch.rand(2048, 2048).to(dtype) for _ in range(2))
        self.c = torch.empty_like(self.a)
        self.samples: list[float] = []
        self.least = math.inf

    def sample(self) -> float:
        """The rate just now, GFLOP/s."""
        if self.samples and self.least > PATIENCE:
            return self.samples[-1]
        times: list[float] = []
        torch.mm(self.a, self.b, out=self.c)  # what a turn before left in the caches
        for _ in range(self.AT_ONCE):
            start = time.perf_counter()
            torch.mm(self.a, self.b, out=self.c)
            times.append(time.perf_counter() - start)
            if times[-1] > PATIENCE:
                break
        self.samples.append(2e-9 * 2048**3 * len(times) / sum(times))
        self.least = min(self.least, *times)
        return self.samples[-1]

    @property
    def rate(self) -> float:
        return median(self.samples)

    @property
    def best(self) -> float:
        """Of a single product: a twentieth of a second."""
        return 2e-9 * 2048**3 / self.least


# ---- the table ----


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


WARM_UP = 12  # steps: kernels of the largest products compete in the engine's first ones


@dataclasses.dataclass
class Result:
    row: Row
    seconds: dict[str, float]
    rate: float  # GFLOP/s of a peer that takes one second
    peak: Peak
    share: dict[str, float]  # of the peak
    memory: dict[str, float]
    first: dict[str, float]


def measure(row: Row, args: argparse.Namespace) -> Result:
    """All peers of one row, in turns."""
    operations = count_operations(dataclasses.replace(row, bf16=False))  # as many, and not for minutes
    work = make_work(row)
    library = jemalloc()
    peers: dict[str, LocalPeer | RemotePeer] = {"eager": LocalPeer(row, work, WRAPS["eager"])}
    if not args.no_compile:
        peers["torch.compile"] = LocalPeer(row, work, WRAPS["torch.compile"])
    if library:
        peers["eager, jemalloc"] = RemotePeer(row, library, torch.get_num_threads())
    peers["onnxtrain"] = LocalPeer(row, work, WRAPS["onnxtrain"])
    peak = Peak(torch.bfloat16 if row.bf16 and multiplies_bfloat16() else torch.float32)
    first, quick = {}, dict(peers)
    times: dict[str, list[float]] = {name: [] for name in peers}
    for name, peer in peers.items():
        first[name] = peer.timed(1)
        second = peer.timed(1)
        if second > PATIENCE:
            times[name].append(second)
            del quick[name]
        else:
            peer.timed(WARM_UP - 1)
    gc.collect()
    before = peak.sample()
    shares = {name: [operations / 1e9 / t / before for t in times[name]] for name in peers}
    for _ in range(args.rounds):
        for name, peer in quick.items():
            peer.timed(1)  # finds the peer before it in the caches, as no step of a training does
            times[name].append(peer.timed(work.steps))
            after = peak.sample()
            shares[name].append(operations / 1e9 / times[name][-1] / ((before + after) / 2))
            before = after
    counts = onnxtrain.stats(peers["onnxtrain"].model)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    for peer in peers.values():
        peer.close()
    memory = ({} if args.no_memory else {name: peak_memory(row, name, torch.get_num_threads())
                                         for name in ("eager", "onnxtrain")})
    return Result(row, {name: median(t) for name, t in times.items()}, operations / 1e9, peak,
                  {name: median(s) for name, s in shares.items()}, memory, first)


def print_row(result: Result, markdown: bool) -> None:
    ours = result.seconds["onnxtrain"]
    for name, seconds in result.seconds.items():
        rate = result.rate / seconds
        memory = f"{result.memory[name]:.0f} MiB" if name in result.memory else "-"
        cells = (str(result.row), name, f"{1e3 * seconds:.2f}", f"{seconds / ours:.2f}", f"{rate:.0f}",
                 f"{result.share[name]:.0%}", memory, f"{result.first[name]:.1f}")
        if markdown:
            print("| " + " | ".join(cells) + " |", flush=True)
        else:
            print("{:<38}{:<17}{:>10} ms{:>7}x ours{:>7} GFLOP/s{:>6} of peak{:>11}{:>8} s first".format(*cells),
                  flush=True)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_summary(results: list[Result]) -> None:
    """Each goal beside what was measured."""
    def over_peer(result: Result) -> float:
        return min(result.seconds[name] for name in ("eager", "torch.compile")
                   if name in result.seconds) / result.seconds["onnxtrain"]

    for label, wanted, goal in (("float32", FLOAT32, LEAST["peer"]), ("bf16", BF16, LEAST["bf16"])):
        rows = [r for r in results if r.row in wanted]
        if rows:
            print(f"{label}: {geometric_mean([over_peer(r) for r in rows]):.2f}x the better of eager and torch.compile "
                  f"in the geometric mean (goal {goal}); least {min(map(over_peer, rows)):.2f}x, "
                  f"{min(rows, key=over_peer).row}")
    for r in results:
        notes = [f"{over_peer(r):.2f}x the better peer (goal {LEAST['mlp'] if r.row.name == 'mlp' else LEAST['row']})"]
        if "eager, jemalloc" in r.seconds:
            notes.append(f"{r.seconds['eager, jemalloc'] / r.seconds['onnxtrain']:.2f}x eager with jemalloc (goal "
                         f"{LEAST['jemalloc']})")
        if r.row.name in ("bert", "gpt2", "transformer") and not r.row.bf16:
            rate = r.rate / r.seconds["onnxtrain"]
            notes.append(f"{r.share['onnxtrain']:.0%} of the peak, {r.peak.rate:.0f} GFLOP/s (goal {LEAST['share']:.0%}; "
                         f"{rate / r.peak.best:.0%} of the best single product)")
        if r.memory and r.row.name in ("bert", "gpt2"):
            notes.append(f"{r.memory['onnxtrain'] / max(r.memory['eager'], 1):.0%} of eager's memory (goal "
                         f"{LEAST['memory']:.0%})")
        print(f"{r.row}: {'; '.join(notes)}")


def print_table(args: argparse.Namespace) -> None:
    rows = [*FLOAT32, *BF16, *OTHER_LOSS]
    if args.workload:
        rows = [row for row in (*rows, *ASKED) if row.name in args.workload]
    elif not multiplies_bfloat16():
        rows = [row for row in rows if not row.bf16]
        print("this processor has no bfloat16 products, and torch takes minutes a step: --workload has such rows")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {_C.build_info()['isa']} (ONNXTRAIN_ISA), "
          f"{'jemalloc ' + str(jemalloc()) if jemalloc() else 'no libjemalloc.so.2: its rows are left out'}; "
          f"{args.rounds} rounds, medians")
    if args.markdown:
        print("| workload | peer | ms a step | peer / onnxtrain | GFLOP/s | of the peak | peak memory beyond "
              "parameters, gradients, state | first step, s |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    results = []
    for row in rows:
        results.append(measure(row, args))
        torch._dynamo.reset()
        gc.collect()
        print_row(results[-1], args.markdown)
    print_summary(results)


assert {row.name for row in (*FLOAT32, *ASKED)} <= set(WORKLOADS)
