"""transformers' Trainer with a wrapped model: the losses, weights and checkpoints of eager's run,
every step in the engine.
"""

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import transformers  # noqa: E402

import onnxtrain  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

STEPS = 30


class Sentences(torch.utils.data.Dataset):
    """Rows of one length; the label follows from the first two words."""

    def __init__(self, n, length=12):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, 90, (n, length), generator=generator)
        self.keep = torch.randint(4, length + 1, (n,), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        mask = (torch.arange(self.ids.shape[1]) < self.keep[i]).long()
        return {"input_ids": self.ids[i], "attention_mask": mask, "labels": (self.ids[i, 0] + self.ids[i, 1]) % 2}


def bert(layers=2):
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        num_labels=2, max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))


def run(model, folder, **options):
    """A run of STEPS steps with an evaluation at its end; the trainer, its losses, what evaluation said."""
    options = {"per_device_train_batch_size": 4, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 3e-3,
               "seed": 3, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True,
               "warmup_steps": 5, "lr_scheduler_type": "cosine", "weight_decay": 0.01,
               "label_names": ["labels"]} | options
    trainer = transformers.Trainer(model=model, args=transformers.TrainingArguments(output_dir=str(folder), **options),
                                   train_dataset=Sentences(4 * STEPS + 2), eval_dataset=Sentences(10))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer, losses, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("options",
                         [{}, {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "max_steps": 10},
                          {"bf16": True, "max_steps": 10}], ids=["plain", "accumulation", "bf16"])
def test_bert_classification(tmp_path, options):
    plain = bert(1 if options else 2)
    model = ORTModule(copy.deepcopy(plain))
    _, want, want_eval = run(plain, tmp_path / "eager", **options)
    trainer, got, got_eval = run(model, tmp_path / "ours", **options)
    tolerance = 5e-2 if "bf16" in options else 1e-3
    assert len(got) == options.get("max_steps", STEPS)
    assert (got == pytest.approx(want, rel=tolerance, abs=tolerance)
            and got_eval == pytest.approx(want_eval, rel=tolerance))
    if not options:
        for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-4, msg=name)
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    forwards = options.get("max_steps", STEPS) * options.get("gradient_accumulation_steps", 1)
    assert counts["engine_steps"] == forwards + 2  # two batches of eight in the evaluation


def test_checkpoints_resume_in_the_plain_module(tmp_path):
    model = ORTModule(bert(1))
    trainer, losses, _ = run(model, tmp_path, max_steps=6, save_strategy="steps", save_steps=3)
    trainer.save_model(str(tmp_path / "final"))
    again = ORTModule(bert(1))
    resumed = transformers.Trainer(model=again, args=trainer.args, train_dataset=trainer.train_dataset)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    rest = [row["loss"] for row in resumed.state.log_history if "loss" in row]
    assert rest == pytest.approx(losses, rel=1e-4)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    assert onnxtrain.stats(again)["engine_steps"] == 3 and onnxtrain.stats(again)["fallback_steps"] == 0
    from safetensors.torch import load_file

    # the file is what a plain module reads
    files = sorted((tmp_path / "final").glob("*.safetensors"))
    saved = load_file(files[0]) if files else torch.load(tmp_path / "final" / "pytorch_model.bin")
    plain = bert(1)
    assert not plain.load_state_dict(saved, strict=False).missing_keys
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
