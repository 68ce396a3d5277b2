"""The sample against eager on Wikitext-2: python tests/bench/accuracy.py [--data DIR] [--steps 200] [--dropout-steps 300]

With dropout 0: losses step by step, and every parameter's gradient at step 1. With dropout 0.2: mean loss of the last 50
steps over three seeds (--dropout-steps 0 leaves that out).
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from pathlib import Path

import torch
import torch.nn as nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "getting_started"))
import data  # noqa: E402
import onnxtrain  # noqa: E402
from model import TransformerModel  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

warnings.filterwarnings("ignore")
BPTT = 35


def train(model: nn.Module, source: torch.Tensor, words: int, steps: int, label: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of `steps` steps as the sample takes them, and the gradients of the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    losses, first = [], []
    for step in tqdm(range(steps), desc=label, mininterval=2):
        inputs, targets = data.get_batch(source, step * BPTT % (len(source) - BPTT - 1), BPTT)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).view(-1, words), targets)
        loss.backward()
        if not first:
            first = [p.grad.clone() for p in model.parameters()]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=data.default_folder())
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dropout-steps", type=int, default=300)
    args = parser.parse_args()
    ids, _, words, name = data.load(args.data)
    source = data.batchify(ids, 20)
    torch.manual_seed(0)
    module = TransformerModel(words, dropout=0.0)
    ours = ORTModule(copy.deepcopy(module))
    eager_losses, eager_grads = train(module, source, words, args.steps, "eager, dropout 0")
    our_losses, our_grads = train(ours, source, words, args.steps, "onnxtrain, dropout 0")
    counts = onnxtrain.stats(ours)
    assert counts["engine_steps"] == args.steps and not counts["fallback_steps"], counts
    loss_error = max(abs(a - b) / a for a, b in zip(eager_losses, our_losses))
    grad_error = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(eager_grads, our_grads))
    print(f"{name}, dropout 0, {args.steps} steps: largest relative difference of the loss {loss_error:.1e} (goal 1e-4), "
          f"of a gradient at step 1 {grad_error:.1e} of its largest entry (goal 1e-5)")
    if not args.dropout_steps:
        return
    means: dict[str, list[float]] = {"eager": [], "onnxtrain": []}
    for seed in range(3):
        for label, wrap in (("eager", lambda m: m), ("onnxtrain", ORTModule)):
            torch.manual_seed(seed)
            losses, _ = train(wrap(TransformerModel(words)), source, words, args.dropout_steps, f"{label}, seed {seed}")
            means[label].append(sum(losses[-50:]) / len(losses[-50:]))
    eager, our = (sum(means[label]) / 3 for label in ("eager", "onnxtrain"))
    print(f"{name}, dropout 0.2, last 50 of {args.dropout_steps} steps, three seeds: eager {eager:.4f}, onnxtrain {our:.4f}, "
          f"difference {abs(our - eager) / eager:.2%} (goal 1%)")


if __name__ == "__main__":
    main()
