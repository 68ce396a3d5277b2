"""The training loop that train.py and train_ort.py share; they differ in how they wrap the model, or who steps."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import torch
from model import TransformerModel
from torch import Tensor, nn
from tqdm import tqdm

BATCH, EVAL_BATCH, BPTT = 20, 10, 35


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains a transformer language model on the CPU.")
    parser.add_argument("--data", type=Path, default=data.default_folder(), help="folder with train, valid, test.txt")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-batches", type=int, default=150, help="per epoch; 0: all")
    parser.add_argument("--dropout", type=float, default=0.0, help="above 0, the runs draw other masks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="writes losses and times as JSON")
    return parser


def evaluate(model: nn.Module, source: Tensor, vocabulary: int, batches: int) -> float:
    """Mean loss per token over at most `batches` batches."""
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for i, start in enumerate(range(0, source.size(0) - BPTT - 1, BPTT)):
            if batches and i >= batches:
                break
            inputs, targets = data.get_batch(source, start, BPTT)
            logits = model(inputs)
            total += len(inputs) * nn.functional.cross_entropy(logits.view(-1, vocabulary), targets).item()
            count += len(inputs)
    model.train()
    return total / max(count, 1)


class TorchSteps:
    """Steps as PyTorch takes them, for modules: loss, backward, clipping, SGD."""

    def __init__(self, model: nn.Module, vocabulary: int, lr: float) -> None:
        self.model, self._vocabulary, self.lr = model, vocabulary, lr
        self._criterion = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One step; the loss."""
        self._optimizer.param_groups[0]["lr"] = self.lr
        self._optimizer.zero_grad()
        loss = self._criterion(self.model(inputs).view(-1, self._vocabulary), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self._optimizer.step()
        return loss


def train(wrap: Callable[[nn.Module], nn.Module], label: str, args: argparse.Namespace,
          steps: Callable[[nn.Module, int, float], Any] = TorchSteps) -> None:
    """Trains and prints, per epoch, loss, perplexity and ms per batch."""
    torch.manual_seed(args.seed)
    train_ids, valid_ids, vocabulary, corpus = data.load(args.data)
    source, valid = data.batchify(train_ids, BATCH), data.batchify(valid_ids, EVAL_BATCH)
    model = wrap(TransformerModel(vocabulary, dropout=args.dropout))
    step = steps(model, vocabulary, 0.5)
    starts = list(range(0, source.size(0) - BPTT - 1, BPTT))[: args.max_batches or None]
    print(f"{label}: {corpus}, {len(train_ids):,} tokens, {vocabulary:,} words, {len(starts)} batches an epoch")
    losses: list[float] = []
    times: list[float] = []
    model.train()
    for epoch in range(1, args.epochs + 1):
        first = len(losses)
        bar = tqdm(starts, desc=f"{label} {epoch}/{args.epochs}", mininterval=0.5)
        for start in bar:
            inputs, targets = data.get_batch(source, start, BPTT)
            begin = time.perf_counter()
            loss = step(inputs, targets)
            times.append(1e3 * (time.perf_counter() - begin))
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.2f}", ms=f"{times[-1]:.0f}")
        mean = sum(losses[first:]) / len(starts)
        valid_loss = evaluate(model, valid, vocabulary, 40)
        median = sorted(times[first:])[len(starts) // 2]
        print(f"{label} | epoch {epoch} | loss {mean:.3f} | perplexity {math.exp(mean):9.2f} | "
              f"valid loss {valid_loss:.3f} | {median:.1f} ms a batch (median)")
        step.lr *= 0.95
    if args.result:
        fresh = args.result.with_suffix(".new")
        fresh.write_text(json.dumps({"label": label, "losses": losses, "times": times}))
        fresh.replace(args.result)
