"""A model of how long each kernel of a training step takes on an H100, from sizes and counts of instructions.

    export PYTHONPATH=.:tests:tests/bench
    python tests/cuda/times.py PLUGIN [MODEL...] [--tiny] [--rows N] [--own-attention]

This is a model, not a measurement: nothing runs, and no GPU is needed. PLUGIN is the emulated device
(cuda/emulate/build.py prints its path), for which the programs of gpt2 and llama (tests/bench/gpu.py, full sizes) are
built. A kernel takes as long as its bytes take at the bandwidth of memory, or its arithmetic at the rate of the units
that it is bound by, whichever is longer, and a constant per launch: costs.py. Printed are the sums by part of the step,
beside the best known figures, and the N longest rows of equal nodes. The status is 1 where the model of a step is above
the best known figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import NamedTuple

import gpu as bench
import planned
import torch
from costs import KEY, PHASES, C, Cost, cost_of, optimizer
from planned import Node, Value

from onnxtrain import _C

PARTS = ("products", "attention", "loss", "scores in pieces", "norms, elementwise", "copies", "bias gradients",
         "weights in 16 bits", "embeddings", "optimizer", "launches")
# The best known figures of whole steps in ms, and of their parts where there are estimates.
BEST = {
    "gpt2": {"step": (36.0, "torch.compile; 35.2 was measured on an H200"), "products": 20.0, "attention": 5.0,
             "loss": 3.0, "norms, elementwise": 4.0, "bias gradients": 0.3, "weights in 16 bits": 0.3,
             "embeddings": 0.7, "optimizer": 2.0, "launches": 1.0},
    "llama": {"step": (150.0, "eager; an estimate"), "products": 95.0, "attention": 18.0},
}


class Row(NamedTuple):
    """Equal nodes together."""
    what: str
    count: int
    cost: Cost

    @property
    def seconds(self) -> float:
        return self.count * self.cost.seconds

    @property
    def launches(self) -> int:
        return self.count * self.cost.launches

    @property
    def least(self) -> float:
        """Seconds at the rates of memory and of products without what is assumed for the kernel."""
        return self.count * max(self.cost.nbytes / C["copy"], self.cost.flops / C["tensor"])


def shown(value: Value | None) -> str:
    short = {"float": "f32", "bfloat16": "bf16", "float16": "f16", "double": "f64", "int64": "i64", "int32": "i32"}
    return "-" if value is None else f"{short.get(value.dtype, value.dtype)}{list(value.shape)}".replace(" ", "")


def described(node: Node) -> str:
    """Operator and operands; long lists of them are cut."""
    inputs, outputs = ([shown(v) for v in values if v is not None] for values in (node.inputs, node.outputs))
    cut = lambda texts: " ".join(texts[:4]) + (" ..." if len(texts) > 4 else "")  # noqa: E731
    return f"{node.op} {cut(inputs)} -> {cut(outputs)}"


def rows_of(nodes: Iterable[Node], parameters: Iterable[torch.nn.Parameter], own: bool = False) -> list[Row]:
    """The longest first."""
    found: dict[tuple[str, Cost], int] = {}
    for node in nodes:
        key = described(node), cost_of(node, own)
        found[key] = found.get(key, 0) + 1
    rows = [Row(what, count, cost) for (what, cost), count in found.items()]
    more = [Row("AdamW, torch's or FusedAdam", 1, optimizer(parameters)), Row("random key of a phase", PHASES, KEY)]
    return sorted([*rows, *more], key=lambda row: -row.seconds)


def by_part(rows: Iterable[Row]) -> dict[str, tuple[float, int, float, float, float]]:
    """Seconds, launches, bytes, FLOP on tensor cores, and least seconds of each part."""
    sums = dict.fromkeys(PARTS, (0.0, 0, 0.0, 0.0, 0.0))
    launches = 0
    for row in rows:
        more = (row.seconds, row.launches, row.count * row.cost.nbytes, row.count * row.cost.flops, row.least)
        sums[row.cost.part] = tuple(map(sum, zip(sums[row.cost.part], more)))
        launches += row.launches
    sums["launches"] = (launches * C["launch"], launches, 0.0, 0.0, 0.0)
    return sums


def is_slower(name: str, rows: Iterable[Row]) -> bool:
    """Whether the model of a step is above the best known figure."""
    return name in BEST and sum(sums[0] for sums in by_part(rows).values()) * 1e3 > BEST[name]["step"][0]


def part_table(name: str, rows: list[Row]) -> list[str]:
    best = BEST.get(name, {})
    lines = ["| part | launches | GB | TFLOP | at the peaks, ms | model, ms | best known, ms |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    total = [0.0, 0.0]
    for part, (seconds, launches, nbytes, flops, least) in by_part(rows).items():
        known = f"{best[part]:.1f}" if part in best else "-"
        lines.append(f"| {part} | {launches} | {nbytes / 1e9:.2f} | {flops / 1e12:.2f} | {least * 1e3:.2f} | "
                     f"{seconds * 1e3:.2f} | {known} |")
        total[0] += least
        total[1] += seconds
    whole = f"{best['step'][0]:.0f}, {best['step'][1]}" if best else "-"
    return [*lines, f"| all | | | | {total[0] * 1e3:.2f} | {total[1] * 1e3:.2f} | {whole} |"]


def row_table(rows: list[Row], most: int) -> list[str]:
    lines = ["| ms | at the peaks | nodes | launches | MB each | part | node |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {row.seconds * 1e3:.3f} | {row.least * 1e3:.3f} | {row.count} | {row.launches} | "
              f"{row.cost.nbytes / 1e6:.1f} | {row.cost.part} | {row.what} |" for row in rows[:most]]
    rest = rows[most:]
    if rest:
        lines.append(f"| {sum(r.seconds for r in rest) * 1e3:.3f} | {sum(r.least for r in rest) * 1e3:.3f} | "
                     f"{sum(r.count for r in rest)} | {sum(r.launches for r in rest)} | | | the others |")
    return lines


def main(arguments: list[str]) -> int:
    """The status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plugin")
    parser.add_argument("model", nargs="*", default=["gpt2", "llama"])
    parser.add_argument("--tiny", action="store_true", help="the small sizes of tests/bench/gpu.py")
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--own-attention", action="store_true", help="as where cuDNN declines")
    chosen = parser.parse_args(arguments)
    _C.open_plugin(chosen.plugin)
    slower = []
    for name in chosen.model:
        nodes, parameters = planned.planned(lambda: bench.TASKS[name](chosen.tiny), "emulated")
        rows = rows_of(nodes, parameters, chosen.own_attention)
        print(f"{name}: {len(nodes)} nodes; a model, not a measurement\n")
        print("\n".join([*part_table(name, rows), "", *row_table(rows, chosen.rows), ""]), flush=True)
        if is_slower(name, rows):
            slower.append(name)
            print(f"{name}: the model is above the best known step\n")
    return int(bool(slower))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
