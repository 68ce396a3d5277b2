"""The sample against eager on Wikitext-2: python tests/bench/accuracy.py [--data DIR] [--steps 200] [--dropout-steps
300]

Dropout 0, three readings. From equal weights: eager trains, and at every step onnxtrain computes loss and gradients at
eager's own weights; beside it eager's gradients with one thread. Free: both train on their own. Control: eager with one
thread against eager with all, which says how far rounding alone carries two runs apart. Dropout 0.2: mean loss of the
last 50 steps over three seeds (--dropout-steps 0 leaves that out). With --plot FILE the distance of the free runs is
drawn.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "getting_started"))
import data  # noqa: E402
from model import TransformerModel  # noqa: E402

import onnxtrain  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

warnings.filterwarnings("ignore")
BPTT = 35


class Sample:
    """The corpus in batches, and a step as the sample takes it."""

    def __init__(self, folder: Path | None) -> None:
        ids, _, self.words, self.name = data.load(folder)
        self.source = data.batchify(ids, 20)

    def gradients(self, model: nn.Module, step: int) -> float:
        """Loss at batch `step`; the gradients are in the parameters."""
        inputs, targets = data.get_batch(self.source, step * BPTT % (len(self.source) - BPTT - 1), BPTT)
        for parameter in model.parameters():
            parameter.grad = None
        loss = nn.functional.cross_entropy(model(inputs).view(-1, self.words), targets)
        loss.backward()
        return loss.item()

    def train(self, model: nn.Module, steps: int, label: str) -> list[float]:
        """Losses of `steps` steps."""
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        losses = []
        for step in tqdm(range(steps), desc=label, mininterval=2):
            losses.append(self.gradients(model, step))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return losses


def farthest(expected: nn.Module, got: nn.Module) -> float:
    """The largest difference of a gradient's entry, over that gradient's largest entry."""
    return max(((a.grad - b.grad).abs().max() / a.grad.abs().max()).item()
               for a, b in zip(expected.parameters(), got.parameters()))


def along(sample: Sample, eager: nn.Module, copies: list[nn.Module], steps: int) -> Iterator[tuple[int, float]]:
    """Eager trains; at each step the copies take its weights, and the caller has the step and eager's loss, whose
    gradients are in the parameters.
    """
    optimizer = torch.optim.SGD(eager.parameters(), lr=5.0)
    for step in tqdm(range(steps), desc="from equal weights", mininterval=2):
        with torch.no_grad():
            for copied in copies:
                for theirs, own in zip(eager.parameters(), copied.parameters()):
                    own.copy_(theirs)
        yield step, sample.gradients(eager, step)
        nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        optimizer.step()


def from_equal_weights(sample: Sample, module: nn.Module, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Per step: relative difference of the loss, distance of the gradients, and that of eager with one thread."""
    eager, single, ours = copy.deepcopy(module), copy.deepcopy(module), ORTModule(copy.deepcopy(module))
    losses, gradients, control = [], [], []
    threads = torch.get_num_threads()
    for step, expected in along(sample, eager, [single, ours], steps):
        got = sample.gradients(ours, step)
        torch.set_num_threads(1)
        sample.gradients(single, step)
        torch.set_num_threads(threads)
        losses.append(abs(got - expected) / expected)
        gradients.append(farthest(eager, ours))
        control.append(farthest(eager, single))
    counts = onnxtrain.stats(ours)
    assert counts["engine_steps"] == steps and not counts["fallback_steps"], counts
    return losses, gradients, control


def distance(one: list[float], other: list[float]) -> list[float]:
    return [abs(a - b) / a for a, b in zip(one, other)]


def first_above(values: list[float], limit: float) -> str:
    return next((f"step {i + 1}" for i, value in enumerate(values) if value > limit), "never")


def draw(path: Path, curves: dict[str, list[float]]) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for label, values in curves.items():
        pyplot.semilogy(range(1, len(values) + 1), [max(value, 1e-9) for value in values], label=label)
    pyplot.xlabel("step")
    pyplot.ylabel("relative difference of the loss")
    pyplot.legend()
    pyplot.savefig(path, dpi=120)


def without_dropout(sample: Sample, steps: int, plot: Path | None) -> None:
    torch.manual_seed(0)
    module = TransformerModel(sample.words, dropout=0.0)
    losses, gradients, control = from_equal_weights(sample, module, steps)
    print(f"{sample.name}, dropout 0, {steps} steps from equal weights: largest relative difference of the loss "
          f"{max(losses):.1e} (goal 1e-4), of a gradient {max(gradients):.1e} of its largest entry, at step 1 "
          f"{gradients[0]:.1e} (goal 1e-5); eager with one thread: {max(control):.1e}, {control[0]:.1e}")
    eager = sample.train(copy.deepcopy(module), steps, "eager, dropout 0")
    ours = distance(eager, sample.train(ORTModule(copy.deepcopy(module)), steps, "onnxtrain, dropout 0"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    control = distance(eager, sample.train(copy.deepcopy(module), steps, "eager, one thread"))
    torch.set_num_threads(threads)
    for label, values in (("onnxtrain against eager", ours), (f"eager with 1 against {threads} threads", control)):
        print(f"free runs, {label}: above 1e-6 at {first_above(values, 1e-6)}, above 1e-4 at "
              f"{first_above(values, 1e-4)}, largest {max(values):.1e}, mean of the last 50 "
              f"{sum(values[-50:]) / len(values[-50:]):.1e}")
    if plot:
        draw(plot, {"onnxtrain against eager": ours, "eager, 1 thread against all": control,
                    "onnxtrain from eager's weights": losses})


def with_dropout(sample: Sample, steps: int) -> None:
    means: dict[str, list[float]] = {"eager": [], "onnxtrain": []}
    for seed in range(3):
        for label, wrap in (("eager", lambda m: m), ("onnxtrain", ORTModule)):
            torch.manual_seed(seed)
            losses = sample.train(wrap(TransformerModel(sample.words)), steps, f"{label}, seed {seed}")
            means[label].append(sum(losses[-50:]) / len(losses[-50:]))
    eager, our = (sum(means[label]) / 3 for label in ("eager", "onnxtrain"))
    print(f"{sample.name}, dropout 0.2, last 50 of {steps} steps, three seeds: eager {eager:.4f}, onnxtrain {our:.4f}, "
          f"difference {abs(our - eager) / eager:.2%} (goal 1%)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=data.default_folder())
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dropout-steps", type=int, default=300)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    sample = Sample(args.data)
    if args.steps:
        without_dropout(sample, args.steps, args.plot)
    if args.dropout_steps:
        with_dropout(sample, args.dropout_steps)


if __name__ == "__main__":
    main()
