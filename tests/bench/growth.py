"""How a step's time grows with sequence, batch, layers and vocabulary, against eager and torch.compile: a table and a
plot.

    python tests/bench/growth.py [--axis sequence|batch|layers|vocabulary]... [--rounds 5] [--results growth.json]
    [--plot growth.svg]

A GPT of 4 layers, 256 wide, 4 heads, 2 x 128 tokens of 8,192 words, its loss inside, each with its fused AdamW; one of
the four sizes at a time takes the values of AXES. Peers of a point take turns; torch.compile meets each size for the
first time, so that it specialises. Points already in the results are kept, whatever else is asked for; the plot is of
all of them.

A knee is where our time grows by a higher power of the size than both peers' from one point to the next.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import warnings
from pathlib import Path

import torch
from step_table import WARM_UP, WRAPS, LocalPeer, Row
from tqdm import tqdm
from workloads import GPT2, Workload

import onnxtrain

AXES = {
    "sequence": [64, 128, 256, 512, 1024, 2048],
    "batch": [1, 2, 4, 8, 16, 32, 64],
    "layers": [2, 4, 8, 16, 32, 48],
    "vocabulary": [1024, 4096, 16384, 65536, 262144],
}
BASE = {"sequence": 128, "batch": 2, "layers": 4, "vocabulary": 8192}
ROUND_SECONDS = 0.2  # a round of a peer takes at least so long
KNEE = 0.25  # powers that noise makes


def make(sizes: dict[str, int]) -> Workload:
    torch.manual_seed(0)
    module = GPT2(sizes["vocabulary"], width=256, heads=4, layers=sizes["layers"], positions=sizes["sequence"])
    x, y = torch.randint(0, sizes["vocabulary"], (2, sizes["batch"], sizes["sequence"]))
    return Workload(module, (x, y), lambda m, x, y: m(x, y), 1, (x[:1], y[:1]))


def measure(sizes: dict[str, int], rounds: int) -> dict[str, float]:
    """Milliseconds a step of every peer, medians of interleaved rounds."""
    work = make(sizes)
    torch._dynamo.reset()
    peers = {name: LocalPeer(Row("gpt2", "adamw"), work, wrap) for name, wrap in WRAPS.items()}
    steps = {}
    for name, peer in peers.items():
        peer.timed(WARM_UP)
        steps[name] = max(1, math.ceil(ROUND_SECONDS / peer.timed(1)))
    times: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, peer in peers.items():
            times[name].append(peer.timed(steps[name]))
    assert onnxtrain.stats(peers["onnxtrain"].model)["fallback_steps"] == 0
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def power(points: list[tuple[int, dict[str, float]]], at: int, peer: str) -> float:
    """The power of the size that a peer's time grows by between points at - 1 and at."""
    (small, before), (large, after) = points[at - 1], points[at]
    return math.log(after[peer] / before[peer]) / math.log(large / small)


def print_axis(axis: str, points: list[tuple[int, dict[str, float]]]) -> None:
    print(f"| {axis} | eager | torch.compile | onnxtrain | ratio | power of growth: eager, torch.compile, onnxtrain |\n"
          "| --- | --- | --- | --- | --- | --- |")
    for at, (size, ms) in enumerate(points):
        peers = [power(points, at, name) for name in WRAPS] if at else []
        knee = "; a knee" if peers and peers[2] > max(peers[:2]) + KNEE else ""
        growth = ", ".join(f"{p:.2f}" for p in peers) + knee
        ratio = min(ms["eager"], ms["torch.compile"]) / ms["onnxtrain"]
        print(f"| {size} | {ms['eager']:.1f} | {ms['torch.compile']:.1f} | {ms['onnxtrain']:.1f} | {ratio:.2f} | "
              f"{growth} |")


def plot(results: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "growth"
    figure, panels = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    for panel, (axis, points) in zip(panels.flat, results.items(), strict=False):
        sizes = [int(size) for size in points]
        for name, marker in zip(WRAPS, "os^", strict=True):
            panel.plot(sizes, [point[name] for point in points.values()], marker=marker, label=name)
        panel.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms a step", xticks=sizes, xticklabels=sizes)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels.flat[0].legend()
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
    os.replace(partial, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", choices=AXES, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, help="no size above it")
    parser.add_argument("--results", type=Path, default=Path("growth.json"))
    parser.add_argument("--plot", type=Path, default=Path("growth.svg"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    wanted = [(axis, size) for axis in args.axis or AXES for size in AXES[axis] if not args.most or size <= args.most]
    for axis, size in tqdm([(axis, size) for axis, size in wanted if str(size) not in results.get(axis, {})],
                           unit="point"):
        results.setdefault(axis, {})[str(size)] = measure(BASE | {axis: size}, args.rounds)
        partial = args.results.with_name(args.results.name + ".partial")
        partial.write_text(json.dumps(results, indent=1))
        os.replace(partial, args.results)
        gc.collect()
    results = {axis: dict(sorted(results[axis].items(), key=lambda item: int(item[0]))) for axis in AXES
               if axis in results}
    for axis, points in results.items():
        print_axis(axis, [(int(size), ms) for size, ms in points.items()])
        print()
    plot(results, args.plot)


if __name__ == "__main__":
    main()
