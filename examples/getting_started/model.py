"""The language model of PyTorch's sequence-to-sequence transformer tutorial: it builds its mask inside forward."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class PositionalEncoding(nn.Module):
    """Adds sine and cosine positions to (sequence, batch, width), then drops out."""

    def __init__(self, width: int, dropout: float, longest: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(longest, dtype=torch.float).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, 1, width)
        table[:, 0, 0::2] = torch.sin(position * rate)
        table[:, 0, 1::2] = torch.cos(position * rate)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.table[: x.size(0)])


class TransformerModel(nn.Module):
    """Embedding, positions, `layers` encoder layers under a causal mask, and a decoder over the vocabulary.

    forward takes token ids (sequence, batch), int64, and gives logits (sequence, batch, vocabulary), float32.
    """

    def __init__(self, vocabulary: int, width: int = 200, heads: int = 2, hidden: int = 200, layers: int = 2,
                 dropout: float = 0.2) -> None:
        super().__init__()
        self.width = width
        self.mask: Tensor | None = None
        self.positions = PositionalEncoding(width, dropout)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.embedding = nn.Embedding(vocabulary, width)
        self.decoder = nn.Linear(width, vocabulary)
        for weight in (self.embedding.weight, self.decoder.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    @staticmethod
    def causal_mask(size: int) -> Tensor:
        return torch.triu(torch.full((size, size), float("-inf")), diagonal=1)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != len(tokens):
            self.mask = self.causal_mask(len(tokens)).to(tokens.device)
        x = self.positions(self.embedding(tokens) * math.sqrt(self.width))
        return self.decoder(self.encoder(x, self.mask))
