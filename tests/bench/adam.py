"""FusedAdam against torch's AdamW in interleaved rounds of one run; medians, GB/s and ratios.

    python tests/bench/adam.py [--case NAME ...] [--rounds 10] [--scale 1.0] [--markdown]

GB/s counts what a step must move: parameter, gradient and two moments read, parameter and moments written, that is 28
bytes a float32 parameter and 14 a bfloat16 one; SGD with momentum 20, LAMB 40 (its second pass reads parameter and
moments again). With clipping torch runs clip_grad_norm_ and then its step; ours is one call. Above the table stands
what torch.add reaches on this machine. "no arithmetic" is a loop that reads and writes what a step must and computes
nothing (it needs a C compiler): the machine's own limit in the same rounds. Its last column against torch fused's is
the most that anything could win there.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from onnxtrain.optim import SGD, AdamWMode, FusedAdam, Lamb

HIDDEN, WORDS, CONTEXT, LAYERS = 768, 50257, 1024, 12


def gpt2() -> list[tuple[int, ...]]:
    """The 148 parameters of GPT-2 124M."""
    h = HIDDEN
    layer = [(h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,), (h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]
    return [(WORDS, h), (CONTEXT, h), *(layer * LAYERS), (h,), (h,)]


def shapes_of(case: str, scale: float) -> list[tuple[int, ...]]:
    """scale < 1 makes the first dim of matrices, or the number of small tensors, smaller."""
    if case.startswith("small"):
        return [(1000,)] * max(1, int(10_000 * scale))
    if case.startswith("large"):
        return [(max(1, int(100_000_000 * scale)),)]
    return [(max(1, int(s[0] * scale)), *s[1:]) if len(s) > 1 else s for s in gpt2()]


def make(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.empty(shape, dtype=dtype).normal_(generator=generator))
        param.grad = torch.empty(shape, dtype=dtype).normal_(generator=generator) * 1e-2
        params.append(param)
    return params


LIMIT = r"""
#include <stdint.h>
__attribute__((target_clones("avx512f", "avx2", "default")))
static void touch_part(int64_t *restrict a, int64_t *restrict b, int64_t *restrict c, const int64_t *restrict d,
                       int64_t n)
{
    for (int64_t i = 0; i < n; i++) a[i] ^= d[i], b[i] ^= d[i], c[i] ^= d[i];
}
void touch(int64_t parts, int64_t **p, int64_t **g, int64_t **m, int64_t **v, const int64_t *words)
{
#pragma omp parallel for schedule(dynamic)
    for (int64_t k = 0; k < parts; k++) touch_part(p[k], m[k], v[k], g[k], words[k]);
}
"""
PART = 1 << 17  # words: as much as a thread takes at once


@functools.cache
def limit_library() -> ctypes.CDLL | None:
    """LIMIT compiled, for the instruction sets that processors here have; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "limit.c", Path(folder) / "limit.so"
        source.write_text(LIMIT)
        flags = ["-O3", "-mprefer-vector-width=512", "-fopenmp", "-shared", "-fPIC"]
        done = subprocess.run([compiler, *flags, str(source), "-o", str(library)], capture_output=True)
        return ctypes.CDLL(str(library)) if done.returncode == 0 else None


class NoArithmetic:
    """Reads parameters, gradients and two moments and writes all but the gradients, and has no other use."""

    def __init__(self, params: list) -> None:
        self.held = [(p.detach(), p.grad, torch.zeros_like(p), torch.zeros_like(p)) for p in params]
        width = self.held[0][0].element_size()
        rows = [(*(t.data_ptr() + 8 * first for t in tensors), min(PART, words - first))
                for tensors in self.held for words in [tensors[0].numel() * width // 8]
                for first in range(0, words, PART)]
        self.columns = [(ctypes.c_int64 * len(rows))(*column) for column in zip(*rows)]

    def step(self) -> None:
        limit_library().touch(ctypes.c_int64(len(self.columns[0])), *self.columns)


OPTIONS = {"lr": 1e-4, "weight_decay": 0.01}
PEERS: dict[str, Callable] = {
    "loop": lambda p: torch.optim.AdamW(p, foreach=False, **OPTIONS),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True, **OPTIONS),
    "torch fused": lambda p: torch.optim.AdamW(p, fused=True, **OPTIONS),
    "onnxtrain": lambda p: FusedAdam(p, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH, **OPTIONS),
}
LIMITED: dict[str, Callable] = {"no arithmetic": NoArithmetic, **PEERS}
SGD_PEERS: dict[str, Callable] = {
    "torch fused": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, fused=True),
    "onnxtrain": lambda p: SGD(p, lr=1e-4, momentum=0.9),
}
LAMB_PEERS: dict[str, Callable] = {"onnxtrain": lambda p: Lamb(p, **OPTIONS)}
# case: dtype, bytes a parameter, clip, peers
CASES: dict[str, tuple[torch.dtype, int, bool, dict[str, Callable]]] = {
    "gpt2 float32": (torch.float32, 28, False, LIMITED),
    "gpt2 bfloat16": (torch.bfloat16, 14, False, LIMITED),
    "gpt2 float32 clip": (torch.float32, 32, True, PEERS),
    "small float32": (torch.float32, 28, False, PEERS),
    "large float32": (torch.float32, 28, False, LIMITED),
    "large bfloat16": (torch.bfloat16, 14, False, LIMITED),
    "sgd gpt2 float32": (torch.float32, 20, False, SGD_PEERS),
    "lamb gpt2 float32": (torch.float32, 40, False, LAMB_PEERS),
}


def stepper(make_optimizer: Callable, params: list, clip: bool, ours: bool) -> Callable[[], None]:
    optimizer = make_optimizer(params)
    if not clip:
        return optimizer.step
    if ours:
        optimizer.max_grad_norm = 1.0
        return optimizer.step

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()

    return clip_and_step


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def run(case: str, rounds: int, scale: float, only: list[str]) -> list[tuple[str, str, float, float, float]]:
    dtype, width, clip, peers = CASES[case]
    shapes = shapes_of(case.removeprefix("sgd ").removeprefix("lamb "), scale)
    total = sum(torch.Size(shape).numel() for shape in shapes)
    peers = {name: make_peer for name, make_peer in peers.items() if not only or name in only}
    if not limit_library():
        peers.pop("no arithmetic", None)
    steps = {name: stepper(make_peer, make(shapes, dtype), clip, name == "onnxtrain")
             for name, make_peer in peers.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()
    for step in steps.values():
        step()
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    ours = median(times["onnxtrain"])
    return [(case, name, 1e3 * median(t), total * width / median(t) / 1e9, median(t) / ours)
            for name, t in times.items()]


def bandwidth() -> float:
    """GB/s of torch.add on large tensors: two read, one written."""
    a, b, c = (torch.ones(64 * 2**20 // 4) for _ in range(3))
    took = []
    for _ in range(7):
        start = time.perf_counter()
        torch.add(a, b, out=c)
        took.append(time.perf_counter() - start)
    return 3 * a.numel() * 4 / median(took) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--peer", choices=LIMITED, action="append", help="besides onnxtrain")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; torch.add {bandwidth():.0f} GB/s")
    if args.markdown:
        print("| case | peer | ms a step | GB/s | peer / onnxtrain |\n| --- | --- | --- | --- | --- |")
    for case in args.case or CASES:
        for row in run(case, args.rounds, args.scale, [*args.peer, "onnxtrain"] if args.peer else []):
            text = ("| {} | {} | {:.1f} | {:.1f} | {:.2f} |" if args.markdown
                    else "{:<20}{:<14}{:>9.1f} ms{:>8.1f} GB/s{:>8.2f}x")
            print(text.format(*row), flush=True)


if __name__ == "__main__":
    main()
