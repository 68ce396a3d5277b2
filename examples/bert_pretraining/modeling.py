"""BERT with its two pre-training heads, and with a classification head, in plain PyTorch.

Parameters have the names of published checkpoints (`bert.encoder.layer.0.attention.self.query.weight`), so that weights
go either way. It knows nothing of how it is trained.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class BertConfig:
    """Sizes and rates; field names are those of a bert_config.json."""

    vocab_size: int = 30522
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> BertConfig:
        """Other keys of the file are left alone.

        Raises:
            ValueError: the activation is not gelu, or the heads do not divide the width.
        """
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        config = cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})
        if config.hidden_act != "gelu":
            raise ValueError(f"{path}: hidden_act is {config.hidden_act}, expected gelu")
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(f"{path}: {config.num_attention_heads} heads do not divide a width of "
                             f"{config.hidden_size}")
        return config

    def padded(self) -> BertConfig:
        """The same with a vocabulary that is a multiple of 8."""
        return BertConfig(**{**vars(self), "vocab_size": (self.vocab_size + 7) // 8 * 8})


def norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=1e-12)


class Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        found = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        return self.dropout(self.LayerNorm(found + self.token_type_embeddings(token_type_ids)))


class SelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.rate = config.num_attention_heads, config.attention_probs_dropout_prob
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (layer(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
                             for layer in (self.query, self.key, self.value))
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask,
                                                        dropout_p=self.rate if self.training else 0.0)
        return found.transpose(1, 2).reshape(batch, length, width)


class Output(nn.Module):
    """Back to the width, and the residual."""

    def __init__(self, config: BertConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class Attention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = Output(config, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(x, mask), x)


class Dense(nn.Module):
    """A linear layer under the name `dense`, and its activation."""

    def __init__(self, inner: int, outer: int, activation: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, outer)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x))


class Layer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Dense(config.hidden_size, config.intermediate_size, nn.GELU())
        self.output = Output(config, config.intermediate_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Encoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class BertModel(nn.Module):
    """Ids, segments, mask, int64 (batch, length), to states (batch, length, width) and a pooled one (batch, width)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = Dense(config.hidden_size, config.hidden_size, nn.Tanh())

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embeddings(input_ids, token_type_ids)
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        x = self.encoder(x, mask)
        return x, self.pooler(x[:, 0])


class Transform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(functional.gelu(self.dense(x)))


class Predictions(nn.Module):
    """Scores over the vocabulary, by the weights of the word embeddings."""

    def __init__(self, config: BertConfig, words: nn.Embedding) -> None:
        super().__init__()
        self.transform = Transform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.decoder.weight = words.weight
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.transform(x)) + self.bias


class Heads(nn.Module):
    def __init__(self, config: BertConfig, words: nn.Embedding) -> None:
        super().__init__()
        self.predictions = Predictions(config, words)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


def initialize(model: nn.Module, config: BertConfig) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class BertForPreTraining(nn.Module):
    """The loss of both tasks: cross-entropy of the masked tokens, labels -1 left out, and of the next sentence.

    forward takes input_ids, token_type_ids, attention_mask and masked_lm_labels (batch, length) and
    next_sentence_label (batch,), all int64, and gives a scalar. With `predictions`, which no instance has more masked
    tokens than, scores are computed of that many tokens of each: the loss is the same, for a fraction of the memory.
    """

    def __init__(self, config: BertConfig, predictions: int | None = None) -> None:
        super().__init__()
        self.predictions = predictions
        self.bert = BertModel(config)
        self.cls = Heads(config, self.bert.embeddings.word_embeddings)
        initialize(self, config)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, masked_lm_labels: Tensor,
                next_sentence_label: Tensor) -> Tensor:
        states, pooled = self.bert(input_ids, token_type_ids, attention_mask)
        if self.predictions is not None and self.predictions < input_ids.size(1):
            places = (masked_lm_labels >= 0).to(states.dtype).topk(self.predictions, dim=1).indices
            masked_lm_labels = masked_lm_labels.gather(1, places)
            states = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.size(-1)))
        scores = self.cls.predictions(states)
        masked = functional.cross_entropy(scores.view(-1, scores.size(-1)), masked_lm_labels.view(-1), ignore_index=-1)
        return masked + functional.cross_entropy(self.cls.seq_relationship(pooled), next_sentence_label)


class BertForSequenceClassification(nn.Module):
    """Scores (batch, labels) of a text or a pair."""

    def __init__(self, config: BertConfig, labels: int) -> None:
        super().__init__()
        self.bert = BertModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, labels)
        initialize(self, config)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.bert(input_ids, token_type_ids, attention_mask)[1]))
