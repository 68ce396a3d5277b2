"""Small BERT and GPT-2 of transformers whose batches have padding and tokens without a label, and how gradients of such
batches are compared. Needs transformers.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
         "max_position_embeddings": 32}
GPT2 = {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 1, "use_cache": False}
BATCH, LENGTH = 4, 20


class Loss(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, labels):
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss


class Shifted(nn.Module):
    """A causal model with the usual loss of the next token."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, labels):
        scores = self.model(input_ids=ids, attention_mask=mask).logits
        return F.cross_entropy(scores[:, :-1].reshape(-1, scores.shape[-1]), labels[:, 1:].reshape(-1))


MODELS = {
    "masked tokens": lambda: Loss(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))),
    "classes": lambda: Loss(transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))),
    "last token": lambda: Loss(transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**GPT2))),
    "next token": lambda: Shifted(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))),
}


def batch(kind, left=False, seed=5, lengths=(20, 12, 7, 3)):
    """(ids, mask, labels); `left`: padding in front."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 48, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(0, LENGTH - length) if left else slice(length, None)] = 0
    ids = ids * mask
    if kind in ("classes", "last token"):
        return ids, mask, torch.tensor([0, 1, 0, 1])
    chosen = torch.rand(ids.shape, generator=generator) < 0.3 if kind == "masked tokens" else torch.tensor(True)
    return ids, mask, torch.where(chosen & (mask > 0), ids, -100)


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name.removeprefix("_torch_module."): p.grad for name, p in model.named_parameters()}


def same(got, wanted, tolerance):
    """Gradients; those of a bias of keys are rounding alone, so that all are measured by the largest."""
    assert got.keys() == wanted.keys()
    largest = max(g.abs().max().item() for g in wanted.values() if g is not None)
    for name, value in wanted.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance * largest,
                                       msg=lambda m: f"{name}: {m}")


def totals(model):
    """Of the largest program."""
    found = [program.totals() for _, programs in model._all_programs() for program in programs]
    return max(found, key=lambda stats: stats["steps"])
