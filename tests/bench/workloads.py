"""Workloads that benchmarks share: each gives a module, a batch, the loss of a step, and steps per timed round."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "getting_started"))
from model import TransformerModel  # noqa: E402

WORDS = 28782  # of the whole of Wikitext-2


class Workload(NamedTuple):
    module: nn.Module
    batch: tuple[torch.Tensor, ...]
    loss: Callable[..., torch.Tensor]  # (model, *batch)
    steps: int
    resized: tuple[torch.Tensor, ...]  # the same batch with another size of its dynamic dim


def mlp() -> Workload:
    """784-500-10, batch 64."""
    module = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10))
    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))
    return Workload(module, (x, y), lambda m, x, y: F.cross_entropy(m(x), y), 200, (x[:63], y[:63]))


def transformer() -> Workload:
    """The getting-started sample: 35 x 20 words of Wikitext-2's vocabulary."""
    x, y = torch.randint(0, WORDS, (35, 20)), torch.randint(0, WORDS, (700,))
    return Workload(TransformerModel(WORDS), (x, y), lambda m, x, y: F.cross_entropy(m(x).view(-1, WORDS), y), 3,
                    (x[:, :19], y[:665]))


def cnn() -> Workload:
    """Two convolutions with BatchNorm, pooling and two linear layers, 64 images of 1 x 28 x 28."""
    module = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
                           nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
    return Workload(module, (x, y), lambda m, x, y: F.cross_entropy(m(x), y), 10, (x[:63], y[:63]))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs),
                                  nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                                                             nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet18() -> Workload:
    """ResNet-18 with a 3x3 stem, 32 images of 3 x 32 x 32."""
    blocks = [Residual(i, o, s) for i, o, s in ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2),
                                                (256, 256, 1), (256, 512, 2), (512, 512, 1))]
    module = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *blocks,
                           nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    return Workload(module, (x, y), lambda m, x, y: F.cross_entropy(m(x), y), 1, (x[:31], y[:31]))


class Block(nn.Module):
    """GPT-2's block: pre-LayerNorm, causal attention, GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.ln1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln2(x))


def scores_or_loss(scores: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
    return scores if targets is None else F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class GPT2(nn.Module):
    """GPT-2 with tied embeddings; forward gives the loss of predicting `targets`, or the scores without them."""

    def __init__(self, words: int = 50257, width: int = 768, heads: int = 12, layers: int = 12,
                 positions: int = 1024) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if name.endswith(("out.weight", "mlp.2.weight"))
                                else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return scores_or_loss(self.head(self.norm(x)), targets)


def gpt2() -> Workload:
    """GPT-2 of 124M parameters, 4 x 64 tokens."""
    x, y = torch.randint(0, 50257, (4, 64)), torch.randint(0, 50257, (4, 64))
    return Workload(GPT2(), (x, y), lambda m, x, y: m(x, y), 1, (x[:3], y[:3]))


class Bert(nn.Module):
    """A post-LayerNorm encoder with a language-model head over every position; with `targets` the loss."""

    def __init__(self, words: int = 30522, width: int = 512, layers: int = 4, positions: int = 512,
                 heads: int = 8) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.encoder(self.drop(self.norm(x)))
        return scores_or_loss(self.head(x), targets)


def bert() -> Workload:
    """BERT-style, 4 layers, 512 wide, 8 x 128 tokens, vocabulary 30522, dropout 0.1."""
    x, y = torch.randint(0, 30522, (8, 128)), torch.randint(0, 30522, (8, 128))
    return Workload(Bert(), (x, y), lambda m, x, y: m(x, y), 1, (x[:7], y[:7]))


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., 2021) for x (batch, heads, length, size)."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and a gated MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder in the style of Llama 3; forward gives the loss of predicting `targets`, or the scores without them."""

    def __init__(self, words: int = 128256, width: int = 2048, heads: int = 32, kv_heads: int = 8, hidden: int = 8192,
                 layers: int = 16, positions: int = 2048, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight
        size = width // heads
        angles = torch.arange(positions)[:, None] / 500000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x, length = self.words(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return scores_or_loss(self.head(self.norm(x)), targets)


def llama() -> Workload:
    """Llama-style, 4 layers, 512 wide, 8 heads of queries and 4 of keys, 8 x 128 tokens, vocabulary 32000, untied."""
    x, y = torch.randint(0, 32000, (8, 128)), torch.randint(0, 32000, (8, 128))
    return Workload(Llama(32000, 512, 8, 4, 1376, 4, tied=False), (x, y), lambda m, x, y: m(x, y), 1, (x[:7], y[:7]))


WORKLOADS: dict[str, Callable[[], Workload]] = {f.__name__: f for f in (mlp, transformer, cnn, resnet18, gpt2, bert,
                                                                        llama)}
LOSS_INSIDE = ("gpt2", "bert", "llama")


class WithLoss(nn.Module):
    """A module of scores, whose forward takes the targets as well and gives the loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.module(x)
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), targets)


def workload(name: str, loss_inside: bool | None = None) -> Workload:
    """As WORKLOADS has it, or with its loss moved inside the module or outside."""
    work = WORKLOADS[name]()
    within = name in LOSS_INSIDE
    if loss_inside is None or loss_inside == within:
        return work
    if loss_inside:
        return work._replace(module=WithLoss(work.module), loss=lambda m, x, y: m(x, y))
    return work._replace(loss=lambda m, x, y: scores_or_loss(m(x), y))
