"""Padded, unlabelled and unread rows: eager PyTorch, onnxtrain with every row, and onnxtrain for the loss, in turns.

    python tests/bench/sparsity.py [--task mlm,classes] [--layers 12] [--width 768] [--batch 8] [--length 128]
                                   [--density 0.6,1.0] [--labelled 0.15] [--rounds 7] [--no-eager] [--outside]
                                   [--loss-alone] [--bf16]

A BERT of transformers as it is, whose result has scores beside the loss, with AdamW, dropout on; lengths are spread
evenly, so that their mean over the batch is the density, and differ between batches. Each round trains every peer on the same batches, in an order that rotates; a
round's time is its mean step. Prints medians, ratios, and the slab and the rows of the latest program. `every row` is
the module wrapped under ORTMODULE_ENABLE_COMPUTE_OPTIMIZER=0, with all results; `onnxtrain` is
ORTModule(model, outputs="loss"). With --outside, the loop computes the loss of the scores of task mlm, which are the
result then. With --loss-alone, `every row` has outputs="loss", too. With --bf16, all train under autocast.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from onnxtrain.optim import FusedAdam
from onnxtrain.ortmodule import ORTModule

EVERY_ROW = {"ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": "0"}


def loss_of(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outside: bool) -> torch.Tensor:
    ids, mask, labels = inputs
    if outside:
        return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits.transpose(1, 2), labels)
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def model_of(args: argparse.Namespace, task: str) -> torch.nn.Module:
    config = transformers.BertConfig(num_hidden_layers=args.layers, hidden_size=args.width,
                                     num_attention_heads=args.width // 64, intermediate_size=4 * args.width,
                                     vocab_size=args.words, max_position_embeddings=max(512, args.length))
    kinds = {"mlm": transformers.BertForMaskedLM, "classes": transformers.BertForSequenceClassification}
    torch.manual_seed(0)
    return kinds[task](config).train()


def batches(args: argparse.Namespace, task: str, density: float, count: int) -> list[tuple[torch.Tensor, ...]]:
    """(ids, mask, labels) each, of lengths between 2 * density - 1 and 1 of the whole."""
    generator, found = torch.Generator().manual_seed(1), []
    low = max(2 * density - 1, 0.02)
    for _ in range(count):
        noise = 0.04 * (torch.rand(args.batch, generator=generator) - 0.5)
        share = torch.linspace(low, 2 * density - low, args.batch) + noise
        lengths = (share.clamp(1 / args.length, 1) * args.length).round().long() if density < 1 else torch.full(
            (args.batch,), args.length)
        mask = (torch.arange(args.length)[None] < lengths[:, None]).long()
        ids = torch.randint(1, args.words, mask.shape, generator=generator) * mask
        chosen = (torch.rand(mask.shape, generator=generator) < args.labelled) & (mask > 0)
        classes = torch.randint(0, 2, (args.batch,), generator=generator)
        labels = torch.where(chosen, ids, -100) if task == "mlm" else classes
        found.append((ids, mask, labels))
    return found


def peers(args: argparse.Namespace, task: str) -> dict[str, tuple[torch.nn.Module, Any]]:
    model, found = model_of(args, task), {}
    if not args.no_eager:
        eager = copy.deepcopy(model)
        found["eager"] = eager, torch.optim.AdamW(eager.parameters(), lr=1e-5, fused=True)
    for name in ("every row", "onnxtrain"):
        if name == "every row":
            os.environ.update(EVERY_ROW)
        else:
            for variable in EVERY_ROW:
                os.environ.pop(variable, None)
        loss_alone = not args.outside and (name == "onnxtrain" or args.loss_alone)
        ours = ORTModule(copy.deepcopy(model), outputs="loss" if loss_alone else ())
        for inputs in batches(args, task, 1.0, 1):  # the variables are read at the first call
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = loss_of(ours, inputs, args.outside)
            loss.backward()
        ours.zero_grad(set_to_none=True)
        found[name] = ours, FusedAdam(ours.parameters(), lr=1e-5)
    return found


def train(model: torch.nn.Module, optimizer: Any, data: list[tuple[torch.Tensor, ...]],
          args: argparse.Namespace) -> float:
    """Seconds a step."""
    start = time.perf_counter()
    for inputs in data:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = loss_of(model, inputs, args.outside)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.perf_counter() - start) / len(data)


def totals(model: torch.nn.Module) -> dict[str, Any]:
    found = [program.totals() for _, programs in model._all_programs() for program in programs]
    return max(found, key=lambda stats: stats["steps"])


def measure(args: argparse.Namespace, task: str, density: float) -> None:
    found = peers(args, task)
    names, times = list(found), {name: [] for name in found}
    for turn in range(args.rounds + 1):
        data = batches(args, task, density, args.steps)
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            seconds = train(*found[name], data, args)
            if turn:  # kernels of products compete in the first one, and programs are built
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{task}, {args.layers} layers of {args.width}, {args.batch} x {args.length}, density {density}, "
          f"{args.labelled} labelled")
    for name in names:
        line = f"  {name:<10} {medians[name] * 1e3:8.1f} ms  {medians['every row'] / medians[name]:5.2f} of every row"
        if name != "eager":
            stats = totals(found[name][0])
            shares = "  ".join(f"{kind} {stats[f'{kind}_rows']}/{stats[f'{kind}_rows_of']}"
                               for kind in ("label", "key", "selected"))
            line += f"  slab {stats['slab_bytes'] / 2**20:7.1f} MiB  {shares}  programs {stats['programs_built']}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="mlm,classes")
    parser.add_argument("--density", default="0.6,1.0")
    parser.add_argument("--labelled", type=float, default=0.15)
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--outside", action="store_true")
    parser.add_argument("--loss-alone", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    for name, default in (("layers", 12), ("width", 768), ("words", 30522), ("batch", 8), ("length", 128),
                          ("rounds", 7), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    for task in args.task.split(","):
        for density in args.density.split(","):
            measure(args, task, float(density))


if __name__ == "__main__":
    main()
