"""Classifies digits with `ort.trainer`, the form of ONNX Runtime's README of May 2020: a training step in one call.

    python train.py                  # digits that are drawn here, of MNIST's size
    python train.py --data FOLDER    # MNIST's own four files, as they are distributed (*-ubyte or *-ubyte.gz)
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import torch
from torch import Tensor, nn

import onnxtrain.compat.onnxruntime  # noqa: F401

# isort: split
import onnxruntime as ort

# Seven segments: top, upper left and right, middle, lower left and right, bottom; which of them a digit has.
SEGMENTS = (((4, 8), (5, 20)), ((4, 7), (13, 8)), ((4, 19), (13, 20)), ((13, 8), (14, 20)), ((14, 7), (23, 8)),
            ((14, 19), (23, 20)), ((23, 8), (24, 20)))
DIGITS = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (count, 784) of shifted digits with noise, float32, and labels (count,)."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draw)
    images = 0.3 * torch.randn(count, 28, 28, generator=draw)
    plain = torch.zeros(10, 28, 28)
    for digit, parts in enumerate(DIGITS):
        for there, ((top, left), (bottom, right)) in zip(parts, SEGMENTS):
            if there == "1":
                plain[digit, top:bottom + 1, left:right + 1] = 1.0
    for image, label, (down, right) in zip(images, labels, torch.randint(-3, 4, (count, 2), generator=draw).tolist()):
        image += plain[label].roll((down, right), (0, 1))
    return images.flatten(1), labels


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """MNIST's files. FileNotFoundError names one that is missing."""
    found = []
    for name, head in ((f"{part}-images-idx3-ubyte", 16), (f"{part}-labels-idx1-ubyte", 8)):
        path = folder / name
        data = path.read_bytes() if path.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
        found.append(torch.frombuffer(bytearray(data[head:]), dtype=torch.uint8))
    return (found[0].view(-1, 784).float() / 255 - 0.1307) / 0.3081, found[1].long()


def main(given: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of MNIST's files")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=6400, help="that are drawn where there is no --data")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    torch.manual_seed(args.seed)
    images, labels = read(args.data, "train") if args.data else drawn(args.images, 1)
    test_images, test_labels = read(args.data, "t10k") if args.data else drawn(1000, 2)
    model = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10))
    trainer = ort.trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9))
    right = 0.0
    for epoch in range(1, args.epochs + 1):
        losses = []
        for rows in torch.randperm(len(images)).split(args.batch):
            loss, _ = trainer.step(images[rows], labels[rows])
            losses.append(loss.item())
        _, scores = trainer.evaluate(test_images, test_labels)
        right = (scores.argmax(1) == test_labels).float().mean().item()
        print(f"epoch {epoch} | loss {sum(losses) / len(losses):.4f} | {100 * right:.1f}% of the test images are right")
    return right


if __name__ == "__main__":
    main()
