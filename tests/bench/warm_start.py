"""The first step of GPT-2 124M in a fresh process, eager against ours with a warm ORTMODULE_CACHE_DIR: python
tests/bench/warm_start.py; and of small models, split, with the memory that is resident after it: ... --models [bert t5]

Each figure of GPT-2 is from the first call of the model to its loss and gradients, imports and construction apart;
medians, of wall clock and of processor time (which a busy machine disturbs less). With --models our imports count, and
each process has made an optimizer before, for which torch imports Dynamo, as a training's has in eager as well.
"mlp" and "densenet121" (of torchvision) are models as well; without names all of first_step.py's and "mlp" run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
BATCH, LENGTH = 1, 128
GOAL, MEMORY = 1.0, 40  # seconds and MiB above eager's
PARTS = ("imports", "capture", "operations", "guards", "lookup", "build", "run")  # each without those within it


def once(kind: str) -> None:
    """One process: prints the seconds of the first and the second step."""
    import torch
    from workloads import GPT2

    import onnxtrain
    from onnxtrain.ortmodule import ORTModule

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    module = GPT2()
    tokens = torch.randint(0, 50257, (BATCH, LENGTH))
    torch.ones(8, 8).requires_grad_(True).mm(torch.ones(8, 8)).sum().backward()  # torch's own start
    seconds = []
    for step in range(2):
        wall, cpu = time.perf_counter(), time.process_time()
        if not step:
            model = module if kind == "eager" else ORTModule(module)
        loss = model(tokens, tokens)
        loss.backward()
        seconds += [time.perf_counter() - wall, time.process_time() - cpu]
    counts = onnxtrain.stats()
    print(*seconds, counts["exports"], counts["cached_exports"], float(loss.detach()))


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def small(name: str) -> tuple[Any, Callable[[Any], Any]]:
    """A model, and what calls it and gives the loss."""
    import torch

    if name == "mlp":
        x = torch.randn(8, 64)
        layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)
        return torch.nn.Sequential(*layers), lambda model: model(x).sum()
    if name == "densenet121":
        import torchvision

        images = torch.randn(2, 3, 64, 64)
        return torchvision.models.densenet121(), lambda model: model(images).sum()
    from transformers_zoo import ZOO

    maker, attentions = ZOO[name]
    module, arguments = maker(attentions[0], 0.1)

    def loss(model: Any) -> Any:
        result = model(**arguments)
        return result.loss if getattr(result, "loss", None) is not None else result.logits_per_text.sum()

    return module.train(), loss


class Clock:
    """Processor seconds by part; a part within another one counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def _turn(self) -> None:
        now = time.process_time()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def times(self, owner: Any, function: str, name: str) -> None:
        """Lets what this function takes count for the part."""
        plain = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return plain(*args, **kwargs)

        setattr(owner, function, timed)


def model_once(name: str, kind: str) -> None:
    """One process: prints the seconds of the first step, its parts, and the memory."""
    import torch

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    module, loss_of = small(name)
    torch.ones(8, 8).requires_grad_(True).mm(torch.ones(8, 8)).sum().backward()  # torch's own start
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    clock, model, counts = Clock(), module, {}
    clock.times(importlib._bootstrap, "_find_and_load", "imports")  # type: ignore[attr-defined]
    wall, used = time.perf_counter(), time.process_time()
    if kind == "ours":
        from torch._dynamo import guards, utils

        import onnxtrain
        from onnxtrain._export import cache
        from onnxtrain.ortmodule import ORTModule, _runner

        for owner, function, part in ((utils, "run_node", "operations"),
                                      (guards.CheckFunctionManager, "__init__", "guards"),
                                      (cache, "digest", "lookup"), (cache, "load", "lookup"),
                                      (cache, "store", "store"), (_runner.GraphRunner, "_program", "export"),
                                      (_runner.Program, "__init__", "build"), (_runner.Program, "__call__", "run")):
            clock.times(owner, function, part)
        model = ORTModule(module)
    with clock.part("capture"):
        loss = loss_of(model)
        with clock.part("run"):
            loss.backward()
    optimizer.step()
    wall, used = time.perf_counter() - wall, time.process_time() - used
    if kind == "ours":
        counts = {key: value for key, value in onnxtrain.stats(model).items()
                  if key in ("exports", "cached_exports", "fallback_steps")}
    print("SPLIT", json.dumps({"wall": wall, "processor": used, "resident": resident(), **clock.seconds, **counts}))


def compare(names: list[str]) -> None:
    """Eager, and ours with and without kept exports, in turn, each in a fresh process."""
    print("| model | eager, s | ours, cold | warm | above eager | of the processor: eager | warm | above eager |",
          *(f"{part} |" for part in PARTS), "MiB: eager | cold | warm | above eager |")
    print("|" + " --- |" * (12 + len(PARTS)))
    kept = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "XDG_CACHE_HOME": folder}  # the default folder is in it
            environment.pop("ORTMODULE_CACHE_DIR", None)

            def run(kind: str) -> dict[str, float]:
                done = subprocess.run([sys.executable, "-W", "ignore", __file__, "--once", f"{name}:{kind}"],
                                      env=environment, capture_output=True, text=True, check=True)
                return json.loads(done.stdout.split("SPLIT")[1])

            cold, rows = run("ours"), {"eager": [], "ours": []}
            for _ in range(ROUNDS):
                for kind, own in rows.items():
                    own.append(run(kind))
        if any(row["exports"] or row["fallback_steps"] for row in rows["ours"]):
            print(f"{name}: not everything is kept: {rows['ours'][0]}")
        eager, ours = ({key: statistics.median(row.get(key, 0.0) for row in own) for key in {*own[0], *PARTS}}
                       for own in rows.values())
        kept += ours["wall"] - eager["wall"] <= GOAL
        print(f"| {name} | {eager['wall']:.2f} | {cold['wall']:.2f} | {ours['wall']:.2f} |"
              f" {ours['wall'] - eager['wall']:.2f} | {eager['processor']:.2f} | {ours['processor']:.2f} |"
              f" {ours['processor'] - eager['processor']:.2f} |", *(f"{ours[part]:.2f} |" for part in PARTS),
              f"{eager['resident']:.0f} | {cold['resident']:.0f} | {ours['resident']:.0f} |"
              f" {ours['resident'] - eager['resident']:.0f} |", flush=True)
    print(f"{kept} of {len(names)} start within {GOAL} s of eager; goal for memory: {MEMORY} MiB above eager")


def gpt2() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ORTMODULE_CACHE_DIR": folder}

        def run(kind: str) -> list[float]:
            done = subprocess.run([sys.executable, "-W", "ignore", __file__, "--once", kind], env=environment,
                                  capture_output=True, text=True, check=True)
            return [float(word) for word in done.stdout.split()[-7:]]

        cold = run("ours")
        print(f"ours, nothing kept: {cold[0]:.2f} s")
        times: dict[str, list[tuple[float, float]]] = {"eager": [], "ours": []}
        for _ in range(ROUNDS):
            for kind, own in times.items():
                first, first_cpu, second, second_cpu, exports, cached, loss = run(kind)
                assert (abs(loss - cold[6]) < 1e-3
                        and (kind == "eager" or (exports, cached) == (0, 1))), (exports, cached, loss)
                own.append((first, first_cpu))
                print(f"{kind:>6}: first step {first:.2f} s ({first_cpu:.2f} of the processor), second {second:.2f} s "
                      f"({second_cpu:.2f})")
        for position, what in enumerate(("wall clock", "processor time")):
            eager, ours = (statistics.median(pair[position] for pair in own) for own in times.values())
            print(f"{what}, median: eager {eager:.2f} s, ours from the cache {ours:.2f} s, above it {ours - eager:.2f} "
                  "s (goal 0.50)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="*", help="none named: all")
    args = parser.parse_args()
    if args.once:
        return model_once(*args.once.split(":")) if ":" in args.once else once(args.once)
    if args.models is None:
        return gpt2()
    from first_step import MODELS

    compare(args.models or [*MODELS, "mlp"])


if __name__ == "__main__":
    main()
