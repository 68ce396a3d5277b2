"""Medians of every kernel of a workload's step, by operator, kernel, result and phase.

    python tests/bench/step_kernels.py mlp|transformer|cnn|resnet18|gpt2|bert|llama [--bf16] [--loss inside|outside]
                                  [--steps 20] [--top 25] [--threads N] [--by operator] [--least]
    python tests/bench/step_kernels.py "resnet50 8x128" ...    # a model of model_zoo.py

The first column is what a step spends there: the medians of its nodes, added up (--least: the least times). Steps are
whole ones, with the optimizer of `step.py --all`, so that kernels meet the caches as they do there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

import torch
from model_zoo import MODELS
from step_table import ASKED, BF16, FLOAT32, LocalPeer, Row, make_work
from workloads import WORKLOADS, Workload

import onnxtrain
from onnxtrain.ortmodule import ORTModule

warnings.filterwarnings("ignore")
WARM_UP = 3


def row_of(args: argparse.Namespace) -> Row:
    known = {row.name: row.optimizer for row in (*FLOAT32, *BF16, *ASKED) if row.bf16 == args.bf16}
    inside = None if args.loss is None else args.loss == "inside"
    return Row(args.workload, known.get(args.workload, "adamw"), args.bf16, inside)


def work_of(row: Row) -> Workload:
    if row.name in WORKLOADS:
        return make_work(row)
    torch.manual_seed(0)
    model = MODELS[row.name]()
    return Workload(model.module.train(), model.batch(), model.loss, 1, ())


def trace(row: Row, steps: int) -> list[dict]:
    """Events of `steps` steps."""
    with tempfile.TemporaryDirectory() as folder:
        peer = LocalPeer(row, work_of(row), ORTModule)
        for _ in range(WARM_UP):
            peer.step()
        with onnxtrain.profile(peer.model) as profile:
            for _ in range(steps):
                peer.step()
        profile.save(Path(folder, "trace.json"))
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return [e for e in events if e.get("cat") in ("forward", "backward")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=[*WORKLOADS, *MODELS])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--loss", choices=("inside", "outside"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--by", choices=("result", "operator"), default="result", help="of what each line is a sum")
    parser.add_argument("--least", action="store_true", help="the least of the steps, on a machine that others use")
    args = parser.parse_args()
    middle = min if args.least else statistics.median
    if args.threads:
        torch.set_num_threads(args.threads)
    row = row_of(args)
    times: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for event in trace(row, args.steps):
        what = event["args"]
        times[event["name"], what["operator"], what["kernel"], what["shape"], event["cat"]].append(event["dur"] / 1e3)
    rows: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (_, *key), samples in times.items():
        calls = len(samples) / args.steps
        key = key if args.by == "result" else [key[0], key[1], key[3]]
        rows[tuple(key)][0] += middle(samples) * calls
        rows[tuple(key)][1] += calls
    total = sum(ms for ms, _ in rows.values())
    print(f"{row}: {total:.2f} ms in kernels, {torch.get_num_threads()} threads, {args.steps} steps")
    print(f"{'ms a step':>10} {'calls':>6}  operator, kernel, {'result, ' * (args.by == 'result')}phase")
    for key, (ms, calls) in sorted(rows.items(), key=lambda item: -item[1][0])[:args.top]:
        print(f"{ms:10.3f} {calls:6.0f}  {'  '.join(key)}")


if __name__ == "__main__":
    main()
