"""Trains a transformer on several processes by DistributedDataParallel, in PyTorch and with ORTModule.

    torchrun --nproc-per-node 2 train.py
    torchrun --nproc-per-node 8 train.py --backend nccl --width 768 --layers 12 --batch 16 --steps 1000     # eight GPUs
"""

from __future__ import annotations

import argparse
import copy
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onnxtrain
from onnxtrain.ortmodule import ORTModule

WORDS, LENGTH = 64, 32


class Sorter(nn.Module):
    """Learns to sort: ids (batch, LENGTH) to scores (batch, LENGTH, WORDS) of the ids in ascending order."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, max(width // 64, 2), 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids) + self.positions))


def train(model: nn.Module, device: torch.device, args: argparse.Namespace) -> tuple[list[float], float]:
    """The loss of each step, over all processes, and the median of the milliseconds that steps took."""
    draw = torch.Generator().manual_seed(args.seed + dist.get_rank())  # each process has rows of its own
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    losses, times = [], []
    for _ in range(args.steps):
        ids = torch.randint(WORDS, (args.batch, LENGTH), generator=draw).to(device)
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.sort().values.flatten())
        optimizer.zero_grad()
        loss.backward()  # sums the gradients over the processes meanwhile
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses, sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: a GPU for each process")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="rows of one process")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    device = torch.device("cpu")
    if args.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    plain = Sorter(args.width, args.layers).to(device)
    model = ORTModule(copy.deepcopy(plain))  # first the wrapper, then DistributedDataParallel around it
    eager_losses, eager_ms = train(DistributedDataParallel(plain), device, args)
    losses, ms = train(DistributedDataParallel(model), device, args)
    counts = onnxtrain.stats(model)
    if dist.get_rank() == 0:
        print("step    eager  onnxtrain")
        for step in range(0, args.steps, max(args.steps // 10, 1)):
            print(f"{step:4} {eager_losses[step]:8.4f}   {losses[step]:8.4f}")
        print(f"{dist.get_world_size()} processes; {counts['engine_steps']} of {args.steps} steps of each ran in the "
              f"engine; eager {eager_ms:.1f} ms a step, onnxtrain {ms:.1f} ms ({eager_ms / ms:.2f}x)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
