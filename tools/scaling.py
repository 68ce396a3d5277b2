"""How training scales over GPUs: a model of a step's time, printed for 1 to 1,024 GPUs, and checked on this machine.

    python tools/scaling.py                  # BERT-large and GPT-2, data parallel and ZeRO stage 1
    python tools/scaling.py --measure        # one and two processes on this machine against the model

docs/scaling.md has the formula and says what the figures of the hardware are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUCKET = 25 << 20  # bytes of one collective, as in onnxtrain/training/_distributed.py
STEPS, WIDTH, LAYERS, BATCH = 20, 1024, 24, 128  # of what is measured


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained, by one GPU in one update."""

    name: str
    parameters: float
    layers: int
    width: int
    sequence: int
    sequences: int  # of one micro-batch
    accumulation: int  # micro-batches of an update

    def flops(self) -> float:
        """Of an update: 6 for each weight and token, and of attention 12 layers width sequence for each token."""
        tokens = self.sequence * self.sequences * self.accumulation
        return tokens * (6 * self.parameters + 12 * self.layers * self.width * self.sequence)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Figures of data sheets, and the shares of them that are reached."""

    flops: float = 312e12  # A100, float16
    reached: float = 0.4
    memory: float = 2.0e12  # bytes a second
    machine: int = 8  # GPUs that NVLink joins
    nvlink: float = 300e9  # bytes a second and direction, of a GPU
    infiniband: float = 25e9  # HDR, 200 Gbit/s, one adapter for each GPU
    wire: float = 0.8
    nvlink_latency: float = 5e-6  # seconds of one message
    infiniband_latency: float = 10e-6


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of one update, and bytes of memory of a GPU."""

    compute: float
    reduce: float
    update: float
    hidden: float  # of reduce, behind backward
    state: float

    @property
    def total(self) -> float:
        return self.compute + self.reduce - self.hidden + self.update


def ring(size: float, members: int, bandwidth: float, latency: float, messages: float) -> float:
    """Seconds of an all-reduce, which is a reduce-scatter and an all-gather: 2 (n - 1) / n of the bytes."""
    if members < 2:
        return 0.0
    return 2 * (members - 1) / members * size / bandwidth + messages * 2 * math.ceil(math.log2(members)) * latency


def step(model: Model, gpus: int, zero: bool, element: int, overlap: float, hardware: Hardware) -> Step:
    """One update of each of so many GPUs.

    Args:
        zero: stage 1: the same bytes, and each updates its part.
        element: bytes of a gradient's element on the wire.
        overlap: share of the last backward that may hide the reduction; 0 for ORTTrainer, which reduces after it.
    """
    inside = min(gpus, hardware.machine)
    machines = math.ceil(gpus / hardware.machine)
    size = model.parameters * element
    messages = math.ceil(size / BUCKET)
    compute = model.flops() / (hardware.flops * hardware.reached)
    reduce = (ring(size, inside, hardware.nvlink * hardware.wire, hardware.nvlink_latency, messages)
              + ring(size / inside, machines, hardware.infiniband * hardware.wire, hardware.infiniband_latency,
                     messages))
    backward = 2 / 3 * compute / model.accumulation
    update = model.parameters * 28 / hardware.memory / (gpus if zero else 1)  # p, m, v read and written, g read
    state = model.parameters * (8 + 8 / (gpus if zero else 1))  # weight and gradient; two moments
    return Step(compute, reduce, update, min(reduce, overlap * backward), state)


MODELS = (
    Model("BERT-large, phase 1", 336e6, 24, 1024, 128, 64, 8),
    Model("BERT-large, phase 2", 336e6, 24, 1024, 512, 16, 16),
    Model("GPT-2 124M", 124e6, 12, 768, 1024, 8, 4),
)


def table(model: Model, element: int, overlap: float, hardware: Hardware) -> str:
    """Markdown: a row for each number of GPUs."""
    lines = [f"{model.name}: {model.sequences} sequences of {model.sequence} tokens x {model.accumulation} for an update "
             "of each GPU", "",
             "| GPUs | compute, ms | reduce, ms | update, ms | hidden, ms | step, ms | efficiency | sequences/s "
             "| state, GiB | ZeRO 1: step, ms | efficiency | state, GiB |",
             "| --- " * 12 + "|"]
    alone = step(model, 1, False, element, overlap, hardware).total
    for gpus in (2**power for power in range(11)):
        plain, zero = (step(model, gpus, stage, element, overlap, hardware) for stage in (False, True))
        sequences = gpus * model.sequences * model.accumulation / plain.total
        parts = [f"{1e3 * value:.1f}" for value in (plain.compute, plain.reduce, plain.update, plain.hidden, plain.total)]
        lines.append(f"| {gpus} | {' | '.join(parts)} | {alone / plain.total:.3f} | {sequences:,.0f} "
                     f"| {plain.state / 2**30:.1f} | {1e3 * zero.total:.1f} | {alone / zero.total:.3f} "
                     f"| {zero.state / 2**30:.2f} |")
    return "\n".join(lines)


# ---- on this machine ----

def trainer_step(net: Any, world: int) -> Callable[..., Any]:
    """A step of ORTTrainer, data parallel."""
    import torch

    from onnxtrain.training import ORTTrainer, ORTTrainerOptions, optim

    trainer = ORTTrainer(
        net, {"inputs": [("input", ["batch", WIDTH]), ("label", ["batch"])],
              "outputs": [("loss", [], True), ("scores", ["batch", WIDTH])]}, optim.AdamConfig(),
        loss_fn=lambda scores, label: torch.nn.functional.cross_entropy(scores, label), options=ORTTrainerOptions({
            "device": {"id": "cpu"}, "distributed": {"world_size": world, "allreduce_post_accumulation": True}}))
    return trainer.train_step


def loop_step(net: Any, world: int, ours: bool) -> Callable[..., Any]:
    """A step of eager PyTorch, or of an ORTModule with FusedAdam, under DistributedDataParallel."""
    import torch

    from onnxtrain.optim import FusedAdam, clip_grad_norm_
    from onnxtrain.ortmodule import ORTModule

    model = ORTModule(net) if ours else net
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    parameters = list(model.parameters())
    optimizer: Any = FusedAdam(parameters) if ours else torch.optim.AdamW(parameters, fused=True)
    clip: Any = clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_

    def step(x: Any, label: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), label).backward()
        clip(parameters, 1.0)
        optimizer.step()

    return step


PEERS: dict[str, Callable[[Any, int], Callable[..., Any]]] = {
    "ORTTrainer": trainer_step, "DDP of ORTModule": lambda net, world: loop_step(net, world, True),
    "DDP of eager": lambda net, world: loop_step(net, world, False)}


def work(path: Path) -> None:
    """A process of the measurement: steps by themselves, the collectives, and steps together; seconds, medians."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    x, label = torch.randn(BATCH, WIDTH), torch.randint(0, WIDTH, (BATCH,))

    def medians(size: int) -> dict[str, float]:
        steps, times = {}, {}
        for peer, maker in PEERS.items():
            torch.manual_seed(0)
            layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
            steps[peer], times[peer] = maker(torch.nn.Sequential(*layers), size), []
        for _ in range(STEPS + 5):
            for peer, step in steps.items():
                if world > 1:
                    dist.barrier()  # all processes are always at the same
                begin = time.perf_counter()
                step(x, label)
                if size > 1:
                    dist.barrier()
                times[peer].append(time.perf_counter() - begin)
        return {peer: statistics.median(values[5:]) for peer, values in times.items()}

    def collective(count: int) -> float:
        value, times = torch.zeros(count), []
        for _ in range(20):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(value)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[3:])

    found: dict[str, Any] = {"alone": medians(1)}
    if world > 1:
        found |= {"small": collective(16), "bucket": collective(BUCKET // 4), "together": medians(world)}
    if int(os.environ.get("RANK", "0")) == 0:
        path.write_text(json.dumps(found))


def measure() -> str:
    """Predicts a step of two processes from their parts, and measures it; and efficiency beside that of DDP."""
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "found.json"
        command = [str(Path(__file__).resolve()), "--work", str(path)]
        subprocess.run([sys.executable, *command], check=True, env=environment, stdout=subprocess.DEVNULL)
        one = json.loads(path.read_text())["alone"]
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
                        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *command], check=True,
                       env=environment, stdout=subprocess.DEVNULL)
        two = json.loads(path.read_text())
    size = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    bandwidth = BUCKET / max(two["bucket"] - two["small"], 1e-9)  # of two processes: 2 (n - 1) / n is 1
    latency = two["small"] / 2
    reduce = ring(size, 2, bandwidth, latency, math.ceil(size / BUCKET) + 2)  # and two messages of few bytes
    alone, together = two["alone"]["ORTTrainer"], two["together"]["ORTTrainer"]
    rows = (("all-reduce of 64 bytes", two["small"]), (f"all-reduce of {BUCKET >> 20} MiB", two["bucket"]),
            ("reduction, by the model", reduce), ("a step by itself, while the other runs", alone),
            ("together, by the model, nothing hidden", alone + reduce), ("together, measured", together))
    table = [f"| {peer} | {1e3 * one[peer]:.1f} | {1e3 * two['alone'][peer]:.1f} | {1e3 * two['together'][peer]:.1f} | "
             f"{one[peer] / two['together'][peer]:.2f} |" for peer in PEERS]
    return "\n".join([f"{size / 2**20:.1f} MiB of gradients, {bandwidth / 1e9:.2f} GB/s",
                      *(f"{name:40} {1e3 * value:9.3f} ms" for name, value in rows),
                      f"{'model / measured':40} {(alone + reduce) / together:9.3f}", "",
                      "| one thread a process | one process, ms | by itself, while the other runs | two together | "
                      "efficiency |", "| --- | --- | --- | --- | --- |", *table])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="one and two processes on this machine, by gloo")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--element", type=int, default=4, choices=(2, 4), help="bytes of an element on the wire")
    parser.add_argument("--overlap", type=float, default=0.0, help="share of backward that hides the reduction")
    for field in dataclasses.fields(Hardware):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = parser.parse_args()
    if given.work:
        work(given.work)
    elif given.measure:
        print(measure())
    else:
        hardware = Hardware(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Hardware)})
        print("\n\n".join(table(model, given.element, given.overlap, hardware) for model in MODELS))


if __name__ == "__main__":
    main()
