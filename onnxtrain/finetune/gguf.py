"""Writes a language model of transformers as a GGUF file, which llama.cpp reads.

Names of tensors and keys are those of the package gguf. What is not in its tables is here: heads of Llama's queries and
keys are stored with the two halves of each head interleaved, since llama.cpp turns neighbouring features; scaled
frequencies are stored as factors of the plain ones; tokens have a type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

# model_type of transformers: architecture of GGUF.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# How a byte-level tokenizer splits its text before it merges: the regular expression, and llama.cpp's name.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_WORDS % r"\p{N}{1,3}": "llama-bpe", _WORDS % r"\p{N}": "qwen2", "digits": "smollm", "": "gpt-2"}


class Refused(Exception):
    """A model that has no form here; the message says why."""


def check(config: Any, tokenizer: Any) -> None:
    """Raises Refused for a model that write() does not write."""
    kind = config.model_type
    if kind not in _ARCHITECTURES:
        raise Refused(f"models of type {kind} are not written, only {', '.join(_ARCHITECTURES)}")
    rope = config.rope_parameters["rope_type"]
    if rope not in (("default", "linear", "llama3") if _ARCHITECTURES[kind] == "llama" else ("default",)):
        raise Refused(f"llama.cpp has no positions of type {rope} for {kind}")
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings and getattr(config, "use_sliding_window", True):
        raise Refused(f"llama.cpp has no sliding window for {kind}")
    if config.hidden_act != "silu":
        raise Refused(f"llama.cpp has no {config.hidden_act} for {kind}")
    _split(json.loads(tokenizer.backend_tokenizer.to_str()))


def _split(backend: dict[str, Any]) -> str:
    """llama.cpp's name of a tokenizer's first split."""
    before = backend["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    if backend["model"]["type"] != "BPE" or not any(step.get("type") == "ByteLevel" for step in steps):
        raise Refused("only byte-level BPE tokenizers are written")
    own = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    own += ["digits" for step in steps if step["type"] == "Digits" and step["individual_digits"]]
    known = _SPLITS.get("".join(map(str, own)))
    if known is None:
        raise Refused("the tokenizer splits its text in a way that has no name here")
    return known


def write(model: Any, tokenizer: Any, path: Path) -> None:
    """Writes weights in their dtype, and vectors in float32, as llama.cpp expects them.

    Raises Refused as check() does, and OSError where the file cannot be written.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    config = model.config
    check(config, tokenizer)
    tensors = _tensors(model)
    half = model.dtype == torch.bfloat16
    writer = GGUFWriter(path, _ARCHITECTURES[config.model_type])
    writer.add_name(f"{Path(config.name_or_path).name or config.model_type}, fine-tuned")
    writer.add_file_type(LlamaFileType.MOSTLY_BF16 if half else LlamaFileType.ALL_F32)
    _add_sizes(writer, config)
    _add_tokens(writer, tokenizer, config.vocab_size)
    kinds = {torch.bfloat16: GGMLQuantizationType.BF16, torch.float32: GGMLQuantizationType.F32}
    for name, tensor in tensors.items():
        dtype = torch.bfloat16 if half and tensor.dim() > 1 else torch.float32
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.numel() * dtype.itemsize, kinds[dtype])
        tensors[name] = tensor.to(dtype)
    turned = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            heads = turned.get(name.split(".")[-2]) if writer.arch == "llama" else None
            if heads:
                tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            tensor = tensor.contiguous()
            writer.write_tensor_data((tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy())
    finally:
        writer.close()


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """By their names in GGUF; a tied head has none."""
    import gguf

    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == _ARCHITECTURES[model.config.model_type])
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    found = {}
    for name, parameter in model.named_parameters():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise Refused(f"{name} has no name in GGUF")
        found[known] = parameter.detach()
    if model.config.rope_parameters["rope_type"] != "default":
        scaled = model.base_model.rotary_emb.inv_freq.float()
        turns = torch.arange(len(scaled)) / len(scaled)
        found["rope_freqs.weight"] = model.config.rope_parameters["rope_theta"] ** -turns / scaled
    return found


def _add_sizes(writer: Any, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokens(writer: Any, tokenizer: Any, count: int) -> None:
    from gguf import TokenType

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    texts, types = [f"[PAD{i}]" for i in range(count)], [TokenType.UNUSED] * count  # the embedding may have more rows
    for text, place in backend["model"]["vocab"].items():
        texts[place], types[place] = text, TokenType.NORMAL
    for place, token in tokenizer.added_tokens_decoder.items():
        texts[place], types[place] = token.content, TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(backend))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    merges = backend["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for place, add in ((tokenizer.bos_token_id, writer.add_bos_token_id),
                       (tokenizer.eos_token_id, writer.add_eos_token_id),
                       (tokenizer.pad_token_id, writer.add_pad_token_id)):
        if place is not None:
            add(place)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
