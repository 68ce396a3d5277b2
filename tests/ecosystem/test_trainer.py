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
from onnxtrain.integrations import wrap_trainer  # noqa: E402
from onnxtrain.optim import SGD, FusedAdam  # noqa: E402
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


def run(model, folder, wrap=lambda trainer: trainer, **options):
    """A run of STEPS steps with an evaluation at its end; the trainer, its losses, what evaluation said."""
    options = {"per_device_train_batch_size": 4, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 3e-3,
               "seed": 3, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True,
               "warmup_steps": 5, "lr_scheduler_type": "cosine", "weight_decay": 0.01,
               "label_names": ["labels"]} | options
    trainer = wrap(transformers.Trainer(
        model=model, args=transformers.TrainingArguments(output_dir=str(folder), **options),
        train_dataset=Sentences(4 * STEPS + 2), eval_dataset=Sentences(10)))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer, losses, trainer.evaluate()["eval_loss"]


OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "max_steps": 10},
                {"bf16": True, "max_steps": 10}], ids=["plain", "accumulation", "bf16"])


@OPTIONS
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


def test_wrapped_by_hand_it_is_a_model_of_transformers(tmp_path):
    """Without label names: an evaluation has its loss and metrics, the best checkpoint is loaded, and its folder is one
    of transformers.
    """
    model = ORTModule(bert(1))
    trainer = transformers.Trainer(
        model=model, train_dataset=Sentences(16), eval_dataset=Sentences(8),
        compute_metrics=lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=2, eval_strategy="epoch",
            save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="right", report_to=[],
            disable_tqdm=True, use_cpu=True, seed=3))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(rows) == 2 and all(0 <= row["eval_right"] <= 1 for row in rows)
    assert trainer.state.best_metric == max(row["eval_right"] for row in rows)
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(trainer.state.best_model_checkpoint)
    for a, b in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(a, b)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (8 + 2, 0), counts["reasons"]


@OPTIONS
def test_wrap_trainer(tmp_path, options):
    """A trainer of the plain module: no label names, and checkpoints that from_pretrained reads."""
    options = {"label_names": None, "save_strategy": "steps", "save_steps": 5} | options
    plain = bert(1)
    ours = copy.deepcopy(plain)
    eager, want, want_eval = run(plain, tmp_path / "eager", **options)
    trainer, got, got_eval = run(ours, tmp_path / "ours", wrap_trainer, **options)
    tolerance = 5e-2 if "bf16" in options else 1e-3
    assert len(got) == options.get("max_steps", STEPS)
    assert (got == pytest.approx(want, rel=tolerance, abs=tolerance)
            and got_eval == pytest.approx(want_eval, rel=tolerance))
    if "bf16" not in options:
        for (name, a), b in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
            torch.testing.assert_close(b[1], a, rtol=2e-2, atol=2e-4, msg=name)
    assert trainer.model is ours and isinstance(trainer.optimizer.optimizer, FusedAdam)
    assert trainer.model_wrapped._outputs == (None if "label_smoothing_factor" in options else ("loss", 0))
    counts = onnxtrain.stats(trainer.model_wrapped)
    forwards = len(got) * options.get("gradient_accumulation_steps", 1)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (forwards + 2, 0), counts["reasons"]
    files = [sorted(path.name for path in (tmp_path / name / "checkpoint-10").iterdir()) for name in ("eager", "ours")]
    assert files[0] == files[1] and "config.json" in files[1]
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours" / f"checkpoint-{len(got)}")
    for a, b in zip(ours.parameters(), saved.parameters(), strict=True):
        assert torch.equal(a, b)


def test_wrap_trainer_evaluates_first_and_trains_twice(tmp_path):
    """Evaluated in the engine before the first step; one ORTModule for all runs; gradient checkpointing; resumed in
    eager, and in the engine from eager's checkpoint.
    """
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True,
               "eval_strategy": "steps", "eval_steps": 2, "label_names": None}

    def evaluated(trainer):
        trainer.evaluate()
        return trainer

    plain = bert(1)
    ours = copy.deepcopy(plain)
    eager, want, want_eval = run(plain, tmp_path / "eager", evaluated, **options)
    trainer, got, got_eval = run(ours, tmp_path / "ours", lambda trainer: evaluated(wrap_trainer(trainer)), **options)
    assert got == pytest.approx(want, rel=1e-3) and got_eval == pytest.approx(want_eval, rel=1e-3)
    wrapper, counts = trainer.model_wrapped, onnxtrain.stats(trainer.model_wrapped)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (4 + 4 * 2, 0), counts["reasons"]
    for wrap, checkpoint in ((wrap_trainer, "eager"), (lambda trainer: trainer, "ours")):
        again = wrap(transformers.Trainer(model=bert(1), args=trainer.args, train_dataset=trainer.train_dataset,
                                          eval_dataset=trainer.eval_dataset))
        again.train(resume_from_checkpoint=str(tmp_path / checkpoint / "checkpoint-2"))
        losses = [row["loss"] for row in again.state.log_history if "loss" in row]
        assert losses == pytest.approx(want, rel=1e-3)
    trainer.train()
    assert trainer.model_wrapped is wrapper and onnxtrain.stats(wrapper)["exports"] == counts["exports"]


def causal_rows():
    draw = torch.Generator().manual_seed(4)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 50, (24, 9), generator=draw)]


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0))


def with_adapter(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2))


@pytest.mark.parametrize("adapter", [False, True])
def test_smoothed_labels_of_a_causal_model(tmp_path, adapter):
    """Trainer shifts the labels where the name of the model's class says that it is causal."""
    losses = {}
    for kind in ("eager", "by hand", "wrap_trainer"):
        model = with_adapter(gpt2()) if adapter else gpt2()
        trainer = transformers.Trainer(
            model=ORTModule(model) if kind == "by hand" else model, train_dataset=causal_rows(),
            args=transformers.TrainingArguments(
                str(tmp_path / kind), max_steps=4, per_device_train_batch_size=3, logging_steps=1, use_cpu=True, report_to=[],
                disable_tqdm=True, save_strategy="no", label_smoothing_factor=0.1, label_names=["labels"]))
        (wrap_trainer(trainer) if kind == "wrap_trainer" else trainer).train()
        losses[kind] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert losses[kind] == pytest.approx(losses["eager"], rel=1e-4), kind


class Penalised(transformers.Trainer):
    """Reads the scores as well."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("way", ["a subclass", "the trainer itself", "compute_loss_func"])
def test_wrap_trainer_where_other_code_reads_the_scores(tmp_path, way):
    def penalty(outputs, labels, num_items_in_batch=None):
        return outputs.logits.square().mean()

    losses = []
    for wrap in (lambda trainer: trainer, wrap_trainer):
        kind = Penalised if way == "a subclass" else transformers.Trainer
        trainer = wrap(kind(
            model=gpt2(), train_dataset=causal_rows(), compute_loss_func=penalty if way == "compute_loss_func" else None,
            args=transformers.TrainingArguments(
                str(tmp_path), max_steps=3, per_device_train_batch_size=3, logging_steps=1, use_cpu=True, report_to=[],
                disable_tqdm=True, save_strategy="no")))
        if way == "the trainer itself":  # after it was wrapped
            trainer.compute_loss = Penalised.compute_loss.__get__(trainer)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert onnxtrain.stats(trainer.model_wrapped)["fallback_steps"] == 0


def test_what_wrap_trainer_leaves_alone(tmp_path):
    model = gpt2()
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], optim="sgd")
    assert wrap_trainer(transformers.Trainer(model, arguments)).optimizer_cls_and_kwargs is None
    own = SGD(model.parameters(), lr=0.1)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = wrap_trainer(transformers.Trainer(model, arguments, optimizers=(own, None)))
    assert trainer.optimizer is own and trainer.optimizer_cls_and_kwargs is None
    trainer = wrap_trainer(transformers.Trainer(model, arguments), fused_adam=False)
    assert trainer.optimizer_cls_and_kwargs is None
    with pytest.raises(TypeError, match="give the trainer the module itself"):
        wrap_trainer(transformers.Trainer(ORTModule(model), arguments))


def same_files(folder, save, save_wrapped):
    for name, function in (("plain", save), ("wrapped", save_wrapped)):
        function(str(folder / name))
    names = [sorted(path.relative_to(folder / kind) for path in (folder / kind).rglob("*") if path.is_file())
             for kind in ("plain", "wrapped")]
    assert names[0] == names[1] and len(names[0]) > 1
    for name in names[0]:
        assert (folder / "plain" / name).read_bytes() == (folder / "wrapped" / name).read_bytes(), name


def test_save_pretrained_writes_the_files_of_the_module(tmp_path):
    """The configuration names the module's class. model.safetensors is equal byte for byte, tied weights too."""
    from safetensors.torch import save_model

    model = gpt2()
    wrapped = ORTModule(model)
    same_files(tmp_path / "transformers", model.save_pretrained, wrapped.save_pretrained)
    shards = {"max_shard_size": "4KB"}
    same_files(tmp_path / "shards", lambda folder: model.save_pretrained(folder, **shards),
               lambda folder: wrapped.save_pretrained(folder, **shards))
    save_model(model, str(tmp_path / "plain"))
    save_model(wrapped, str(tmp_path / "wrapped"))
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "wrapped").read_bytes()
    adapted = with_adapter(gpt2())
    same_files(tmp_path / "peft", adapted.save_pretrained, ORTModule(adapted).save_pretrained)
