"""GGUF files: transformers' reader reads what was written, and what has no form there is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from language_models import TEXTS, model_of, tokenizer_of

from onnxtrain.finetune import gguf

gguf_package = pytest.importorskip("gguf")

SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}


@pytest.mark.parametrize("kind, settings", [
    ("Llama", {}), ("Llama", {"rope_parameters": SCALED}), ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    ("Mistral", {"sliding_window": None}), ("Qwen2", {}), ("Qwen3", {"head_dim": 128})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_file(kind, settings, dtype, tmp_path):
    model, tokenizer = model_of(kind, **settings).to(dtype), tokenizer_of()
    gguf.write(model, tokenizer, tmp_path / "model.gguf")
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    config.rope_parameters = model.config.rope_parameters  # it reads neither the factors nor whether there are biases
    config.attention_bias = getattr(model.config, "attention_bias", False)
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "max_position_embeddings", "vocab_size", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(model.config, name), name
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", config=config, dtype=dtype)
    state = read.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    again = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in (*TEXTS, "other words: é 漢字"):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_scaled_positions_are_factors(tmp_path):
    model = model_of(rope_parameters=SCALED)
    gguf.write(model, tokenizer_of(), tmp_path / "model.gguf")
    tensors = {each.name: each.data for each in gguf_package.GGUFReader(tmp_path / "model.gguf").tensors}
    plain = 10000.0 ** -(torch.arange(8) / 8)
    factors = torch.tensor(np.array(tensors["rope_freqs.weight"]))
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)
    assert factors[0] == 1 and factors[-1] == pytest.approx(8)


@pytest.mark.parametrize("pattern, name", [(r"\p{N}{1,3}", "llama-bpe"), (r"\p{N}", "qwen2")])
def test_name_of_the_split(pattern, name):
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(gguf._WORDS % pattern), "isolated")
    backend = json.loads(tokenizer_of(split).backend_tokenizer.to_str())
    assert gguf._split(backend) == name


def refusals():
    other = tokenizers.pre_tokenizers.Split(tokenizers.Regex("x+"), "isolated")
    yield model_of("Gemma2"), tokenizer_of(), "type gemma2"
    yield model_of("Mistral", sliding_window=16), tokenizer_of(), "sliding window"
    yield model_of("Qwen2", rope_parameters={**SCALED, "rope_type": "linear"}), tokenizer_of(), "type linear for qwen2"
    yield model_of(hidden_act="gelu"), tokenizer_of(), "no gelu"
    yield model_of(), tokenizer_of(other), "splits its text"
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<eos>"))
    yield model_of(), transformers.PreTrainedTokenizerFast(tokenizer_object=words), "byte-level BPE"


def test_refused(tmp_path):
    for model, tokenizer, says in refusals():
        with pytest.raises(gguf.Refused, match=says):
            gguf.write(model, tokenizer, tmp_path / "model.gguf")
        assert not list(tmp_path.iterdir())
