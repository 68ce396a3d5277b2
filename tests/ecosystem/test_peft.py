"""peft's LoRA adapters: put into a model that is then wrapped, and into a wrapped model; equal to eager with adapters
on, off, merged, exchanged and saved.
"""

import copy

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import onnxtrain  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

WORDS = 40
IDS = torch.randint(0, WORDS, (2, 10), generator=torch.Generator().manual_seed(1))


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, use_cache=False))


def lora(rank=4):
    """Adapters that are not zero from the start."""
    return peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0,
                           task_type="CAUSAL_LM", init_lora_weights=False)


def same_steps(plain, wrapped, steps=3):
    """Losses, gradients and weights of both; only parameters that want a gradient get one."""
    models = (plain, wrapped)
    optimizers = [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2) for model in models]
    for _ in range(steps):
        losses = []
        for model in models:
            losses.append(model(input_ids=IDS, labels=IDS).loss)
            model.zero_grad()  # what another adapter had, too
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for (name, a), (_, b) in zip(plain.named_parameters(), wrapped.named_parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == (not b.requires_grad), name
            if b.requires_grad:
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), (_, b) in zip(plain.named_parameters(), wrapped.named_parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5, msg=name)


def same_scores(plain, wrapped):
    torch.testing.assert_close(wrapped(input_ids=IDS, labels=IDS).logits, plain(input_ids=IDS, labels=IDS).logits,
                               rtol=1e-4, atol=1e-5)


def test_adapters_then_the_wrapper(tmp_path):
    plain = peft.get_peft_model(llama(), lora()).train()
    wrapped = ORTModule(copy.deepcopy(plain))
    same_steps(plain, wrapped)
    assert all(("lora_" in name) == (p.grad is not None) for name, p in wrapped.named_parameters())
    assert onnxtrain.stats(wrapped)["exports"] == 1

    before = wrapped(input_ids=IDS, labels=IDS).loss.item()
    with plain.disable_adapter(), wrapped.disable_adapter():
        same_scores(plain, wrapped)
        assert abs(wrapped(input_ids=IDS, labels=IDS).loss.item() - before) > 1e-4
    for change in ("merge_adapter", "unmerge_adapter"):
        for model in (plain, wrapped):
            getattr(model, change)()
        same_scores(plain, wrapped)
    assert wrapped(input_ids=IDS, labels=IDS).loss.item() == pytest.approx(before, rel=1e-5)

    for model in (plain, wrapped):
        torch.manual_seed(5)
        model.add_adapter("other", lora(rank=2))
        model.set_adapter("other")
    same_steps(plain, wrapped, steps=1)
    for model in (plain, wrapped):
        model.set_adapter("default")
    same_scores(plain, wrapped)

    wrapped.save_pretrained(str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(llama(), str(tmp_path))
    same_scores(loaded, wrapped)
    counts = onnxtrain.stats(wrapped)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (12, 0), counts
    same_scores(plain, wrapped.merge_and_unload())


def test_the_wrapper_then_adapters():
    """peft puts its layers into the wrapped module, and calls the wrapper."""
    plain = peft.get_peft_model(llama(), lora()).train()
    inner = ORTModule(llama())
    wrapped = peft.get_peft_model(inner, lora()).train()
    assert wrapped.base_model.model is inner
    with torch.no_grad():
        for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
            b.copy_(a)
    same_steps(plain, wrapped)
    counts = onnxtrain.stats(inner)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (3, 0, 1), counts
