"""Trains a classifier of timm in PyTorch and with ORTModule: the same weights, the same batches.

    python train.py                            # a ResNet-18 on stripes that are drawn here
    python train.py --model vit_small_patch16_224 --size 224 --pretrained --data FOLDER    # a subfolder for each class
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule

CLASSES = 8  # directions of the stripes


def drawn(count: int, size: int) -> torch.utils.data.Dataset:
    """Noisy images (3, size, size) of stripes; the label is their direction."""
    labels = torch.randint(0, CLASSES, (count,))
    angle = (labels * math.pi / CLASSES).view(-1, 1, 1)
    across = torch.arange(size) * torch.cos(angle) + torch.arange(size).view(-1, 1) * torch.sin(angle)
    stripes = torch.sin(across + 2 * math.pi * torch.rand(count, 1, 1))
    return torch.utils.data.TensorDataset(stripes[:, None] + 0.5 * torch.randn(count, 3, size, size), labels)


def batches(data: torch.utils.data.Dataset, size: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As many batches as there are steps, of one shuffled epoch after another."""
    done = 0
    while True:
        for batch in torch.utils.data.DataLoader(data, size, shuffle=True, drop_last=True):
            if done == steps:
                return
            done += 1
            yield batch


def train(model: nn.Module, data: torch.utils.data.Dataset, args: argparse.Namespace) -> tuple[list[float], float]:
    """The loss of each step, and the median of the milliseconds that steps took."""
    torch.manual_seed(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    losses, times = [], []
    for images, labels in batches(data, args.batch, args.steps):
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
    return losses, sorted(times)[len(times) // 2]


def main(given: list[str] | None = None) -> tuple[list[float], list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="a name of timm.list_models()")
    parser.add_argument("--pretrained", action="store_true", help="timm downloads the weights")
    parser.add_argument("--data", type=Path, help="folder of images, with a subfolder for each class")
    parser.add_argument("--size", type=int, default=32, help="of images")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    torch.manual_seed(args.seed)
    classes = CLASSES
    if args.data:
        data = timm.data.ImageDataset(str(args.data), transform=timm.data.create_transform(args.size))
        classes = len(data.reader.class_to_idx)
    else:
        data = drawn(32 * args.batch, args.size)
    eager = timm.create_model(args.model, pretrained=args.pretrained, num_classes=classes)
    model = ORTModule(copy.deepcopy(eager))
    eager_losses, eager_ms = train(eager, data, args)
    losses, ms = train(model, data, args)
    print("step    eager  onnxtrain")
    for step in range(0, args.steps, max(args.steps // 10, 1)):
        print(f"{step:4} {eager_losses[step]:8.4f}   {losses[step]:8.4f}")
    counts = onnxtrain.stats(model)
    print(f"{counts['engine_steps']} of {args.steps} steps ran in the engine; eager {eager_ms:.1f} ms a step, "
          f"onnxtrain {ms:.1f} ms ({eager_ms / ms:.2f}x)")
    return eager_losses, losses


if __name__ == "__main__":
    main()
