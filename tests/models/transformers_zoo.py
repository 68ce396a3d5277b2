"""Models of `transformers` in small, with random weights: name -> (model,
keyword arguments of a call) for an attention.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import transformers as T
from torch import Tensor

#: (attention, dropout) -> (model, arguments)
Maker = Callable[[str, float], tuple[torch.nn.Module, dict[str, Any]]]
SMALL = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
             max_position_embeddings=64)
HEADS = dict(num_key_value_heads=2)
IMAGE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16,
             patch_size=4)
BOTH, EAGER = ("sdpa", "eager"), ("eager",)

# What a configuration calls its dropouts.
BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
GPT2 = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
NEOX = ("hidden_dropout", "attention_dropout")
LLAMA = ("attention_dropout",)
PHI3 = ("resid_pdrop", "embd_pdrop", "attention_dropout")
BART = ("dropout", "attention_dropout", "activation_dropout")
WAV2VEC2 = ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "activation_dropout", "final_dropout")


def words(length: int = 12) -> Tensor:
    return torch.randint(3, 99, (2, length))


def masked(config: type, model: type, drops: tuple[str, ...] = BERT, **more: Any) -> Maker:
    """Masked language models: words, a mask that leaves some out, labels."""
    def make(attention: str, dropout: float) -> tuple[torch.nn.Module, dict[str, Any]]:
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, 9:] = 0
        settings = SMALL | dict.fromkeys(drops, dropout) | more
        inputs = dict(input_ids=words(), attention_mask=mask, labels=words())
        return model(config(**settings, attn_implementation=attention)), inputs
    return make


def causal(config: type, model: type, drops: tuple[str, ...], **more: Any) -> Maker:
    """Language models: words, which are the labels as well."""
    def make(attention: str, dropout: float) -> tuple[torch.nn.Module, dict[str, Any]]:
        x = words()
        settings = SMALL | {"use_cache": False} | dict.fromkeys(drops, dropout) | more
        return model(config(**settings, attn_implementation=attention)), dict(input_ids=x, labels=x)
    return make


def pair(config: type, model: type, drops: tuple[str, ...], **settings: Any) -> Maker:
    """Encoder and decoder."""
    return lambda attention, dropout: (model(config(**settings, **dict.fromkeys(drops, dropout),
                                                    attn_implementation=attention)),
                                       dict(input_ids=words(), labels=words()))


def image(config: type, model: type, size: int, drops: tuple[str, ...], **settings: Any) -> Maker:
    """Classifiers of images."""
    return lambda attention, dropout: (
        model(config(**settings, **dict.fromkeys(drops, dropout), num_labels=5, attn_implementation=attention)),
        dict(pixel_values=torch.randn(2, 3, size, size), labels=torch.tensor([1, 3])))


def whisper(attention: str, dropout: float) -> tuple[torch.nn.Module, dict[str, Any]]:
    config = T.WhisperConfig(vocab_size=99, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2,
                             encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
                             decoder_ffn_dim=64, max_source_positions=20, max_target_positions=32, use_cache=False,
                             pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
                             attn_implementation=attention, **dict.fromkeys(BART, dropout))
    return T.WhisperForConditionalGeneration(config), dict(input_features=torch.randn(2, 16, 40), labels=words())


def clip(attention: str, dropout: float) -> tuple[torch.nn.Module, dict[str, Any]]:
    text = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                max_position_embeddings=32, eos_token_id=2, attention_dropout=dropout)
    config = T.CLIPConfig(text_config=text, vision_config=IMAGE | dict(attention_dropout=dropout), projection_dim=16,
                          attn_implementation=attention)
    return T.CLIPModel(config), dict(input_ids=words(), pixel_values=torch.randn(2, 3, 16, 16), return_loss=True)


def wav2vec2(attention: str, dropout: float) -> tuple[torch.nn.Module, dict[str, Any]]:
    config = T.Wav2Vec2Config(vocab_size=12, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                              intermediate_size=64, conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 3),
                              num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
                              layerdrop=0.0, mask_time_prob=0.0, attn_implementation=attention,
                              **dict.fromkeys(WAV2VEC2, dropout))
    return T.Wav2Vec2ForCTC(config), dict(input_values=torch.randn(2, 400), labels=torch.randint(1, 12, (2, 6)))


# name -> (maker, attentions that the model has)
ZOO: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "bert": (masked(T.BertConfig, T.BertForMaskedLM), BOTH),
    "distilbert": (masked(T.DistilBertConfig, T.DistilBertForMaskedLM, ("dropout", "attention_dropout"), dim=32,
                          n_layers=2, n_heads=4, hidden_dim=64), BOTH),
    "roberta": (masked(T.RobertaConfig, T.RobertaForMaskedLM, pad_token_id=1), BOTH),
    "deberta-v2": (masked(T.DebertaV2Config, T.DebertaV2ForMaskedLM, relative_attention=True,
                          pos_att_type=["p2c", "c2p"], position_buckets=16, norm_rel_ebd="layer_norm",
                          share_att_key=True), EAGER),
    "albert": (masked(T.AlbertConfig, T.AlbertForMaskedLM, embedding_size=16, num_hidden_groups=1), BOTH),
    "gpt2": (causal(T.GPT2Config, T.GPT2LMHeadModel, GPT2), BOTH),
    "gpt-neox": (causal(T.GPTNeoXConfig, T.GPTNeoXForCausalLM, NEOX), BOTH),
    "llama": (causal(T.LlamaConfig, T.LlamaForCausalLM, LLAMA, **HEADS), BOTH),
    "mistral": (causal(T.MistralConfig, T.MistralForCausalLM, LLAMA, sliding_window=6, **HEADS), BOTH),
    "qwen2": (causal(T.Qwen2Config, T.Qwen2ForCausalLM, LLAMA, **HEADS), BOTH),
    "qwen3": (causal(T.Qwen3Config, T.Qwen3ForCausalLM, LLAMA, head_dim=8, **HEADS), BOTH),
    "gemma2": (causal(T.Gemma2Config, T.Gemma2ForCausalLM, LLAMA, head_dim=8, sliding_window=6, **HEADS), EAGER),
    "phi3": (causal(T.Phi3Config, T.Phi3ForCausalLM, PHI3, pad_token_id=0, **HEADS), BOTH),
    "t5": (pair(T.T5Config, T.T5ForConditionalGeneration, ("dropout_rate",), vocab_size=99, d_model=32, d_kv=8, d_ff=64,
                num_layers=2, num_heads=4, use_cache=False, pad_token_id=0, decoder_start_token_id=0), EAGER),
    "bart": (pair(T.BartConfig, T.BartForConditionalGeneration, BART, vocab_size=99, d_model=32, encoder_layers=2,
                  decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
                  decoder_ffn_dim=64, max_position_embeddings=64, use_cache=False), BOTH),
    "whisper": (whisper, BOTH),
    "vit": (image(T.ViTConfig, T.ViTForImageClassification, 16, BERT, **IMAGE), BOTH),
    "swin": (image(T.SwinConfig, T.SwinForImageClassification, 32, (*BERT, "drop_path_rate"), image_size=32,
                   patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4), EAGER),
    "convnext": (image(T.ConvNextConfig, T.ConvNextForImageClassification, 32, ("drop_path_rate",),
                       hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, image_size=32, layer_scale_init_value=0.5),
                 EAGER),
    "clip": (clip, BOTH),
    "wav2vec2": (wav2vec2, BOTH),
    "mamba": (causal(T.MambaConfig, T.MambaForCausalLM, (), state_size=4), EAGER),
    "mixtral": (causal(T.MixtralConfig, T.MixtralForCausalLM, LLAMA, num_local_experts=4, **HEADS), BOTH),
}
#: Models without any dropout.
UNDROPPED = ("mamba",)
CASES = [(name, attention) for name, (_, attentions) in ZOO.items() for attention in attentions]
