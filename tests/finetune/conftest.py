"""A tiny Llama with a tokenizer of its own, and a file of data for it."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

if any(importlib.util.find_spec(name) is None for name in ("peft", "transformers")):
    collect_ignore_glob = ["test_*.py"]
else:
    import tokenizers
    import transformers

TEXTS = [f"the {a} cat {b} on a {c} mat" for a in ("red", "old", "big") for b in ("sat", "ran") for c in ("new", "wet")]
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its tokenizer, as save_pretrained() writes them."""
    path = tmp_path_factory.mktemp("model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.train_from_iterator([*TEXTS, "user assistant"], tokenizers.trainers.WordLevelTrainer(
        special_tokens=["<unk>", "<eos>"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128)).save_pretrained(path)
    return path


@pytest.fixture
def data(tmp_path):
    rows = [{"text": text} for text in TEXTS[:4]]
    rows += [{"prompt": text[:8], "completion": text[8:]} for text in TEXTS[4:8]]
    rows += [{"messages": [{"role": "user", "content": text}]} for text in TEXTS[8:]]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path
