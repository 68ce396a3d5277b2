"""Trains a UNet of diffusers to remove noise (DDPM), in PyTorch and with ORTModule: the same weights, noise and steps.

    python train.py                                                          # discs that are drawn here
    python train.py --data FOLDER --size 64 --channels 128 256 512 --steps 10000 --output unet      # your images
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import diffusers
import torch
from torch import Tensor, nn

import onnxtrain
from onnxtrain.optim import FusedAdam
from onnxtrain.ortmodule import ORTModule


def drawn(count: int, size: int) -> Tensor:
    """Discs of random colours, places and radii, (count, 3, size, size) from -1 to 1."""
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"))
    centre, radius = size * torch.rand(count, 2, 1, 1), size * (0.15 + 0.2 * torch.rand(count, 1, 1))
    inside = ((grid - centre).square().sum(1).sqrt() < radius).float()[:, None]
    return inside * (2 * torch.rand(count, 3, 1, 1) - 1) - (1 - inside)


def read(folder: Path, size: int) -> Tensor:
    """All images of a folder, scaled to (3, size, size). FileNotFoundError if there is none."""
    import numpy
    from PIL import Image

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
    if not paths:
        raise FileNotFoundError(f"there are no .png or .jpg files in {folder}")
    pixels = [numpy.asarray(Image.open(path).convert("RGB").resize((size, size))) for path in paths]
    return torch.from_numpy(numpy.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1


def train(model: nn.Module, images: Tensor, args: argparse.Namespace) -> tuple[list[float], float]:
    """The loss of each step, and the median of the milliseconds that steps took."""
    torch.manual_seed(args.seed)
    schedule = diffusers.DDPMScheduler()
    optimizer = FusedAdam(model.parameters(), lr=args.lr)
    losses, times = [], []
    for _ in range(args.steps):
        clean = images[torch.randint(len(images), (args.batch,))]
        noise, when = torch.randn_like(clean), torch.randint(schedule.config.num_train_timesteps, (args.batch,))
        start = time.perf_counter()
        loss = nn.functional.mse_loss(model(schedule.add_noise(clean, noise, when), when).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
    return losses, sorted(times)[len(times) // 2]


def main(given: list[str] | None = None) -> tuple[list[float], list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of .png and .jpg files")
    parser.add_argument("--size", type=int, default=16, help="of images")
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32], help="of each level of the UNet")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for the trained model, which from_pretrained reads")
    args = parser.parse_args(given)
    torch.manual_seed(args.seed)
    images = read(args.data, args.size) if args.data else drawn(1000, args.size)
    levels = len(args.channels)
    eager = diffusers.UNet2DModel(
        sample_size=args.size, block_out_channels=args.channels, norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownBlock2D",) * (levels - 1) + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (levels - 1))
    model = ORTModule(copy.deepcopy(eager))
    eager_losses, eager_ms = train(eager, images, args)
    losses, ms = train(model, images, args)
    print("step    eager  onnxtrain")
    for step in range(0, args.steps, max(args.steps // 10, 1)):
        print(f"{step:4} {eager_losses[step]:8.4f}   {losses[step]:8.4f}")
    counts = onnxtrain.stats(model)
    print(f"{counts['engine_steps']} of {args.steps} steps ran in the engine; eager {eager_ms:.1f} ms a step, "
          f"onnxtrain {ms:.1f} ms ({eager_ms / ms:.2f}x)")
    if args.output:
        model.save_pretrained(args.output)
    return eager_losses, losses


if __name__ == "__main__":
    main()
