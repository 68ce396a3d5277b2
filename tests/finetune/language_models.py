"""Small language models with a tokenizer that llama.cpp has, too."""

from __future__ import annotations

import tokenizers
import torch
import transformers

TEXTS = ["the red cat sat on a new mat", "12345 don't"]


def tokenizer_of(*splits):
    """A byte-level BPE tokenizer."""
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE())
    last = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*splits, last])
    tokens.train_from_iterator(TEXTS * 9, tokenizers.trainers.BpeTrainer(
        special_tokens=["<eos>"], initial_alphabet=last.alphabet(), vocab_size=300))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>", chat_template="{{ messages }}")


def model_of(kind="Llama", **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, **settings}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # norms, too
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()
