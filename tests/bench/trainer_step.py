"""A whole step of ORTTrainer against ORTModule with FusedAdam, and eager with AdamW, in interleaved rounds of one run.

    python tests/bench/trainer_step.py [--workload mlp|transformer|cnn|resnet18|gpt2|bert|llama]... [--rounds 7]

Each step is forward, loss, backward, clipping of the gradients' norm to 1 and update, from equal weights, and returns the
loss and what the module gives beside it; medians in milliseconds, and the time with ORTModule over the trainer's. The
loss is outside the module in mlp, transformer, cnn and resnet18, as in step.py.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from step import median
from step_table import WARM_UP
from workloads import LOSS_INSIDE, WORKLOADS, Workload

import onnxtrain
from onnxtrain import optim as fused
from onnxtrain.ortmodule import ORTModule
from onnxtrain.training import ORTTrainer, ORTTrainerOptions, optim

warnings.filterwarnings("ignore")
RATE = 1e-4
DEFAULT = ("mlp", "transformer", "cnn", "resnet18", "gpt2")


def by_loop(name: str, work: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
            clip: Callable[..., Any]) -> Callable[[], Any]:
    """A step as a user writes it."""
    parameters = list(model.parameters())
    x, y = work.batch

    def step() -> Any:
        optimizer.zero_grad()
        scores = None if name in LOSS_INSIDE else model(x)
        loss = work.loss(model if scores is None else lambda _: scores, x, y)
        loss.backward()
        clip(parameters, 1.0)
        optimizer.step()
        return loss.detach(), scores if scores is None else scores.detach()

    return step


def by_trainer(name: str, work: Workload, model: torch.nn.Module) -> Callable[[], Any]:
    inside = name in LOSS_INSIDE
    x, y = work.batch
    names = list(model.forward.__code__.co_varnames[1:3]) if inside else [model.forward.__code__.co_varnames[1], "y"]
    outputs: list[tuple[Any, ...]] = [("loss", [], True)]
    if not inside:
        with torch.no_grad():
            outputs.append(("scores", list(model(x).shape)))
    trainer = ORTTrainer(
        model, {"inputs": [(names[0], list(x.shape)), (names[1], list(y.shape))], "outputs": outputs},
        optim.AdamConfig(lr=RATE, lambda_coef=0.01, weight_decay_mode=optim.AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE),
        loss_fn=None if inside else lambda scores, target: work.loss(lambda _: scores, x, target),
        options=ORTTrainerOptions({"device": {"id": "cpu"}}))
    return lambda: trainer.train_step(x, y)


def run(name: str, rounds: int) -> None:
    torch.manual_seed(0)
    work = WORKLOADS[name]()
    models = [copy.deepcopy(work.module) for _ in range(3)]
    wrapped = ORTModule(models[1])
    steps = {
        "eager, AdamW(fused=True)": by_loop(name, work, models[0], torch.optim.AdamW(
            models[0].parameters(), lr=RATE, weight_decay=0.01, fused=True), torch.nn.utils.clip_grad_norm_),
        "ORTModule, FusedAdam": by_loop(name, work, wrapped, fused.FusedAdam(
            wrapped.parameters(), lr=RATE, weight_decay=0.01, adam_w_mode=fused.AdamWMode.ADAMW_TORCH),
            fused.clip_grad_norm_),
        "ORTTrainer": by_trainer(name, work, models[2])}
    for step in steps.values():
        for _ in range(1 + WARM_UP):
            step()
    times: dict[str, list[float]] = {peer: [] for peer in steps}
    for turn in range(rounds):
        for peer, step in [*steps.items()][turn % 3:] + [*steps.items()][:turn % 3]:
            step()  # the peer before it has left nothing in the caches
            begin = time.perf_counter()
            for _ in range(work.steps):
                step()
            times[peer].append((time.perf_counter() - begin) / work.steps)
    assert not onnxtrain.stats()["fallback_steps"], onnxtrain.stats()["reasons"]
    found = {peer: 1e3 * median(values) for peer, values in times.items()}
    loop, whole = found["ORTModule, FusedAdam"], found["ORTTrainer"]
    print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in found.values()) + f" | {loop / whole:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(DEFAULT))
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    print("| workload | eager, AdamW(fused=True), ms | ORTModule, FusedAdam, ms | ORTTrainer, ms | ratio |\n"
          "| --- | --- | --- | --- | --- |")
    for name in given.workload:
        run(name, given.rounds)


if __name__ == "__main__":
    main()
