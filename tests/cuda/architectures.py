"""Small models with operators that those of tests/bench do not have: transposed convolutions, GroupNorm, Resize,
GridSample, Col2Im and recurrent layers in plain torch; and models of `transformers`, where it is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Model = tuple[nn.Module, tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]


class Mixer(nn.Module):
    """The residual block of a diffusion UNet: GroupNorm, SiLU and convolution, twice, with the time added between."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(2, inputs), nn.GroupNorm(2, outputs)
        self.into, self.out = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.skip = nn.Linear(time, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.into(F.silu(self.first(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.out(F.silu(self.second(y)))


class UNet(nn.Module):
    """Two levels down by strided convolutions; up by a transposed convolution and by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.into = nn.Embedding(10, 6), nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList((nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(6, 8, 3, 2, 1)))
        self.blocks = nn.ModuleList(Mixer(i, o, 6) for i, o in ((4, 4), (6, 6), (8, 8), (12, 6), (10, 4)))
        self.up, self.out = nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        time = self.times(step)
        top = self.blocks[0](self.into(x), time)
        middle = self.blocks[1](self.down[0](top), time)
        x = self.up(self.blocks[2](self.down[1](middle), time))
        x = self.blocks[3](torch.cat((x, middle), 1), time)
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        x = self.blocks[4](torch.cat((x, top), 1), time)
        return self.out(F.interpolate(x, size=(12, 10), mode="bilinear"))


def unet() -> Model:
    return UNet(), (torch.randn(2, 3, 8, 8), torch.tensor([3, 7]), torch.randn(2, 3, 12, 10)), \
        lambda m, x, step, y: F.mse_loss(m(x, step), y)


class Recurrent(nn.Module):
    """A tagger: an LSTM of two layers in both directions, a GRU and a plain recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True)
        self.gru, self.rnn = nn.GRU(10, 7, batch_first=True), nn.RNN(7, 4, batch_first=True)
        self.head = nn.Linear(4, 9)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, (_, c) = self.lstm(self.words(tokens))
        x, _ = self.rnn(self.gru(x)[0])
        return self.head(x).flatten(0, 1) + c.sum()


def lstm() -> Model:
    return Recurrent(), (torch.randint(0, 20, (3, 7)), torch.randint(0, 9, (21,))), \
        lambda m, x, y: F.cross_entropy(m(x), y)


class Warped(nn.Module):
    """A spatial transformer, which samples its features where an affine map of them says, and a layer over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.where = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 6)
        self.patches, self.out = nn.Linear(16, 16), nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.into(x))
        theta = self.where(x.mean((2, 3))).reshape(-1, 2, 3) + torch.eye(2, 3, device=x.device)
        x = F.grid_sample(x, F.affine_grid(theta, [x.shape[0], 4, 6, 8], align_corners=False), "bilinear", "border",
                          align_corners=False)
        patches = F.unfold(x, (2, 2), stride=2)
        x = x + F.fold(self.patches(patches.transpose(1, 2)).transpose(1, 2), (6, 8), (2, 2), stride=2)
        return self.out(x)


def warped() -> Model:
    return Warped(), (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 6, 8)), lambda m, x, y: F.mse_loss(m(x), y)


def transformer(name: str) -> Callable[[], Model]:
    """A model of tests/models/transformers_zoo.py, without dropout."""

    def make() -> Model:
        from transformers_zoo import ZOO
        module, inputs = ZOO[name][0]("sdpa", 0.0)
        names = list(inputs)
        return module, tuple(inputs.values()), lambda m, *batch: m(**dict(zip(names, batch, strict=True))).loss

    return make


#: Where an archive of gpu.sh is unpacked, transformers may be missing.
TRANSFORMERS = ("wav2vec2", "roberta", "mixtral") if importlib.util.find_spec("transformers") else ()
ARCHITECTURES: dict[str, Callable[[], Model]] = {
    "unet": unet, "lstm": lstm, "warped": warped, **{name: transformer(name) for name in TRANSFORMERS}}
