"""trl's SFTTrainer and DPOTrainer around a small Llama that is wrapped: losses and weights of eager's run, steps in the
engine. The loss is a torch.autograd.Function that goes over a batch's tokens, whose number is another in each batch.
"""

import os
import random

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # trl asks the hub which base model it has
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
import tokenizers  # noqa: E402
import transformers  # noqa: E402

import onnxtrain  # noqa: E402
from onnxtrain.integrations import wrap_trainer  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

WORDS = "[PAD] [UNK] <s> </s> the a cat dog sits runs on mat road red blue big small sees house tree".split()


def tokenizer():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(WORDS, range(len(WORDS)))), unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]",
                                                bos_token="<s>", eos_token="</s>")


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3))


def rows(names, n=20):
    draw = random.Random(0)
    return datasets.Dataset.from_list([
        {name: " ".join(draw.choices(WORDS[4:], k=draw.randint(3, 8))) for name in names} for _ in range(n)])


def options(folder):
    return {"output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
            "logging_steps": 1, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [],
            "disable_tqdm": True, "save_strategy": "no"}


def sft(model, folder):
    return trl.SFTTrainer(model=model, args=trl.SFTConfig(**options(folder), max_length=16),
                          train_dataset=rows(["text"]), processing_class=tokenizer())


def dpo(model, folder):
    return trl.DPOTrainer(model=model, ref_model=llama(), args=trl.DPOConfig(**options(folder)),
                          train_dataset=rows(["prompt", "chosen", "rejected"]), processing_class=tokenizer())


# The trainer sets a forward of its own on the model that it is given. A wrapper finds that out at its first step, which
# runs past it, and is counted.
@pytest.mark.parametrize("make, given", [(sft, False), (dpo, False), (sft, True)],
                         ids=["sft, wrapped in the trainer", "dpo, wrapped in the trainer", "sft, given wrapped"])
def test_steps_run_in_the_engine(make, given, tmp_path):
    runs = []
    for wrap in (False, True):
        trainer = make(ORTModule(llama()) if wrap and given else llama(), tmp_path / str(wrap))
        if wrap and not given:
            trainer.model = trainer.model_wrapped = ORTModule(trainer.model)
        trainer.train()
        runs.append((trainer.model, [row["loss"] for row in trainer.state.log_history if "loss" in row]))
    (plain, want), (wrapped, got) = runs
    assert len(got) == 4 and got == pytest.approx(want, rel=1e-5)
    for (name, a), b in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5, msg=name)
    counts = onnxtrain.stats(wrapped)
    assert (counts["engine_steps"], counts["fallback_steps"]) == ((3, 1) if given else (4, 0)), counts


@pytest.mark.parametrize("make", [sft, dpo])
def test_wrap_trainer(make, tmp_path):
    runs = []
    for wrap in (lambda trainer: trainer, wrap_trainer):
        trainer = wrap(make(llama(), tmp_path / str(len(runs))))
        trainer.train()
        runs.append((trainer, [row["loss"] for row in trainer.state.log_history if "loss" in row]))
    (plain, want), (ours, got) = runs
    assert len(got) == 4 and got == pytest.approx(want, rel=1e-5) and type(ours.model) is transformers.LlamaForCausalLM
    for (name, a), b in zip(plain.model.named_parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5, msg=name)
    counts = onnxtrain.stats(ours.model_wrapped)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (4, 0), counts
