"""What a configuration needs on 1 to 64 GPUs: memory by onnxtrain's planner, hours by FLOPs. Prints a table.

The planner's figures are of the CPU's programs of few layers and sequences (LAYERS, BATCHES); more are straight lines
through these. Float16 is planned as bfloat16, which has the same size. README.md has the table of BERT-large.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from modeling import BertConfig, BertForPreTraining

import onnxtrain
from onnxtrain.ortmodule import ORTModule

GPUS = (1, 2, 4, 8, 16, 32, 64)
GIB = 2**30
LAYERS, BATCHES = (2, 3), (2, 4)  # of the programs that are planned


@dataclass(frozen=True)
class Phase:
    """Lengths in tokens, batch in sequences of an update over all processes, updates."""

    length: int
    predictions: int
    batch: int
    updates: int


PHASES = (Phase(128, 20, 65536, 7038), Phase(512, 80, 32768, 1563))


def inputs(config: BertConfig, phase: Phase, batch: int) -> tuple[torch.Tensor, ...]:
    """Of the shapes and kinds of a real batch."""
    ids = torch.randint(5, config.vocab_size, (batch, phase.length))
    labels = torch.full_like(ids, -1)
    labels[:, 1:phase.predictions + 1] = ids[:, 1:phase.predictions + 1]
    return ids, torch.zeros_like(ids), torch.ones_like(ids), labels, torch.zeros(batch, dtype=torch.int64)


def planned(config: BertConfig, phase: Phase, fp16: bool) -> list[int]:
    """Bytes that the planner gives to training steps of each of BATCHES sequences, beside weights, gradients and the
    optimizer's state.

    Raises:
        RuntimeError: the engine does not run the model.
    """
    model, found = ORTModule(BertForPreTraining(config, phase.predictions)), []
    for batch in BATCHES:
        with torch.autocast("cpu", torch.bfloat16, enabled=fp16):
            model(*inputs(config, phase, batch))
        counts = onnxtrain.stats(model)
        if counts["fallback_steps"]:
            raise RuntimeError(f"the engine does not run this model: {counts['reasons']}")
        found.append(counts["slab_bytes"])
    return found


def memory(config: BertConfig, phase: Phase, fp16: bool) -> tuple[int, int]:
    """Bytes of any batch, and those that a sequence adds, by programs of few layers: each layer takes the same."""
    few, more = (planned(replace(config, num_hidden_layers=layers), phase, fp16) for layers in LAYERS)
    small, large = (one + (config.num_hidden_layers - LAYERS[0]) * (other - one) // (LAYERS[1] - LAYERS[0])
                    for one, other in zip(few, more))
    each = (large - small) // (BATCHES[1] - BATCHES[0])
    return max(0, small - BATCHES[0] * each), each


def sequence_flops(config: BertConfig, phase: Phase) -> float:
    """Of forward and backward: 6 for a weight of a product and a token it is used for, 12 for a pair of tokens, a width
    and a layer of attention.
    """
    width, length = config.hidden_size, phase.length
    layer = 4 * width**2 + 2 * width * config.intermediate_size
    head = phase.predictions * (width**2 + width * config.vocab_size)
    return 6 * (config.num_hidden_layers * layer * length + head) + 12 * config.num_hidden_layers * width * length**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config_file", default=str(Path(__file__).with_name("config_large.json")))
    parser.add_argument("--precision", default="fp16", choices=["fp16", "fp32"])
    parser.add_argument("--memory", type=float, default=80, help="GB of a GPU, of which nine tenths are used")
    parser.add_argument("--tflops", type=float, default=989, help="peak of a GPU in TFLOP/s; the default is H100's")
    parser.add_argument("--share", type=float, default=0.35, help="of the peak that is reached")
    args = parser.parse_args()
    config = BertConfig.from_json(args.config_file).padded()
    fp16 = args.precision == "fp16"
    count = sum(weight.numel() for weight in BertForPreTraining(config).parameters())
    state = 16 * count  # float32 weights, gradients and two moments
    lines = []
    for phase in PHASES:
        base, each = memory(config, phase, fp16)
        lines.append((phase, base, each))
        print(f"length {phase.length}: {base / GIB:.2f} GiB, and {each / GIB:.3f} for a sequence", flush=True)
    print(f"{count:,} weights; {state / GIB:.1f} GiB for weights, gradients and moments\n")
    print("| GPUs | " + " | ".join(f"length {phase.length}: micro-batch x accumulation | GiB a GPU (ZeRO) | hours"
                                  for phase in PHASES) + " | hours altogether |")
    print("| --- | " + "--- | " * (3 * len(PHASES) + 1))
    for gpus in GPUS:
        cells, hours = [], 0.0
        for phase, base, each in lines:
            own, micro = phase.batch // gpus, 1
            while 2 * micro <= own and state + base + 2 * micro * each <= 0.9 * args.memory * 1e9:
                micro *= 2
            total = state + base + micro * each
            flops = sequence_flops(config, phase) * phase.batch * phase.updates
            took = flops / (gpus * args.tflops * 1e12 * args.share) / 3600
            shared = total - 8 * count * (1 - 1 / gpus)
            cells.append(f"{micro} x {own // micro} | {total / GIB:.1f} ({shared / GIB:.1f}) | {took:.1f}")
            hours += took
        print(f"| {gpus} | " + " | ".join(cells) + f" | {hours:.1f} |")


if __name__ == "__main__":
    main()
