"""LoRA of the families of language models that are fine-tuned most: each runs in the engine whole, with eager's loss and
gradients, with and without padding. And what memory and time a run needs.
"""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers
from finetune_command import run

import onnxtrain
from onnxtrain.finetune.data import batch_of
from onnxtrain.finetune.model import rate
from onnxtrain.ortmodule import ORTModule

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "Llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "Mistral": {"sliding_window": 48}, "Qwen2": {}, "Qwen3": {"head_dim": 8}, "SmolLM3": {}, "Phi": {}, "Phi3": {},
    "Gemma": {"head_dim": 8}, "Gemma2": {"head_dim": 8, "sliding_window": 48},
    "Gemma3": {"head_dim": 8, "sliding_window": 48}, "Granite": {}, "Olmo2": {},
}


ADAPTERS = {"DoRA": {"use_dora": True}, "rsLoRA": {"use_rslora": True}, "a trained head": {"modules_to_save": ["lm_head"]},
            "some layers": {"target_modules": ["q_proj", "v_proj"]}, "words": {"target_modules": ["embed_tokens"]}}


def lora_of(family, **settings):
    torch.manual_seed(0)
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[family], use_cache=False)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model = peft.get_peft_model(model, peft.LoraConfig(**{
        "r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "embedding_A" in name:  # zeros otherwise, and then the other has no gradient
                parameter.normal_(std=0.1)
    return model.train()


def compare(model):
    plain = copy.deepcopy(model)
    wrapped = ORTModule(model, outputs="loss")
    lines = [[5, 6, 7, 8] * 16, [9, 10, 11] * 10]  # 64 tokens, a whole batch; 30, padded
    for chosen in ([lines[0]], lines):
        batch = batch_of([{"input_ids": ids, "labels": ids} for ids in chosen], 0)
        found = []
        for each in (plain, wrapped):
            each.zero_grad()
            loss = each(**batch).loss
            loss.backward()
            found.append((loss.item(), [p.grad for p in each.parameters() if p.requires_grad]))
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
        for ours, eager in zip(found[1][1], found[0][1], strict=True):
            assert (ours - eager).norm() <= 1e-3 * eager.norm() + 1e-6
    stats = onnxtrain.stats(wrapped)
    assert stats["engine_steps"] == 2 and not stats["fallback_steps"] and not stats["reasons"]
    assert not stats["graph_breaks"], stats["graph_breaks"]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_engine_whole(family):
    compare(lora_of(family))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_in_the_engine_whole(adapter):
    compare(lora_of("Llama", **ADAPTERS[adapter]))


@pytest.mark.parametrize("limit, says", [("900GB", "memory level 0"), ("2MB", "more than --memory")])
def test_memory(limit, says, capfd, folder, data, tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")  # which the command replaces
    status, text = run(capfd, folder, data, tmp_path / "out", "--memory", limit, "--max-steps", "1")
    assert says in text and status == ("more than" in says)


def test_memory_of_what_pytorch_runs(capfd, folder, data, tmp_path, monkeypatch):
    def report(model):
        raise RuntimeError("no training step of this model has run in the engine yet")

    monkeypatch.setattr(onnxtrain, "memory_report", report)
    status, text = run(capfd, folder, data, tmp_path / "out", "--memory", "900GB")
    assert status == 1 and "finetune: --memory: no training step of this model has run in the engine" in text


def test_rate():
    small, large = (torch.nn.Sequential(torch.nn.Linear(64, size)) for size in (64, 6400))
    assert 50 < rate(small) / rate(large) < 200
