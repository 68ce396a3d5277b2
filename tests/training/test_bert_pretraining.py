"""examples/bert_pretraining end to end, very small: text, HDF5, both phases, resuming, export, plot, fine-tuning."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import onnx
import pytest
import torch
from distributed_training import mpirun, without_mpi

import onnxtrain

pytest.importorskip("h5py")
pytest.importorskip("tokenizers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bert_pretraining"
MODULES = ("bertPrep", "convert_checkpoint", "create_pretraining_data", "estimate", "find_text", "hdf5_data", "logs",
           "make_vocab", "modeling", "ort_supplement", "plot", "run_classifier_ort", "run_pretraining_ort")
LENGTH, PREDICTIONS = 16, 3
CONFIG = """{"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
"intermediate_size": 32, "max_position_embeddings": 32, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example's modules, by name; they leave nothing behind. Exports are shared by the runs."""
    import importlib
    patch = pytest.MonkeyPatch()
    patch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path_factory.mktemp("exports")))
    patch.syspath_prepend(str(EXAMPLE))
    for name in MODULES:
        patch.delitem(sys.modules, name, raising=False)
    yield Namespace(supplement=importlib.import_module("ort_supplement.ort_supplement"),
                    **{name: importlib.import_module(name) for name in MODULES})
    for name in (*MODULES, "ort_supplement.ort_supplement"):
        sys.modules.pop(name, None)
    patch.undo()


@pytest.fixture(scope="module")
def folder(example, tmp_path_factory) -> Path:
    """Two HDF5 files of each phase's length, a vocabulary, a configuration."""
    folder, rng = tmp_path_factory.mktemp("bert"), random.Random(0)
    words = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    for place, kind in enumerate(("training", "training", "test")):
        articles = ["\n".join(" ".join(rng.choices(words, k=9)) + " padding the line to forty characters"
                              for _ in range(8)) for _ in range(6)]
        (folder / f"text_{kind}_{place}.txt").write_text("\n\n".join(articles) + "\n")
    example.make_vocab.learn(100, folder / "vocab.txt", [str(path) for path in folder.glob("text_training*.txt")])
    (folder / "config.json").write_text(CONFIG)
    vocabulary = example.create_pretraining_data.Vocabulary(folder / "vocab.txt")
    for length in (LENGTH, 2 * LENGTH):
        for text in folder.glob("text_*.txt"):
            example.create_pretraining_data.create(
                [text], folder / str(length) / (text.stem + ".hdf5"), vocabulary,
                example.create_pretraining_data.Recipe(length, PREDICTIONS * length // LENGTH, 1))
    return folder


def train(example, folder: Path, output: str, *options: str, length: int = LENGTH, steps: int = 4) -> Path:
    """One run. The folder of its checkpoints."""
    run = example.run_pretraining_ort
    run.train(run.parse_arguments([
        "--input_dir", str(folder / str(length)), "--config_file", str(folder / "config.json"), "--output_dir",
        str(folder / output), "--max_seq_length", str(length), "--max_predictions_per_seq",
        str(PREDICTIONS * length // LENGTH), "--train_batch_size", "8", "--gradient_accumulation_steps", "2",
        "--max_steps", str(steps), "--learning_rate", "0.02", "--warmup_proportion", "0.3", "--do_train",
        "--disable_progress_bar", "--json-summary", str(folder / f"{output}.json"), "--num_steps_per_checkpoint", "2",
        *options]))
    return folder / output


@pytest.fixture(scope="module")
def phase1(example, folder) -> Path:
    steps = onnxtrain.stats()["fallback_steps"]
    output = train(example, folder, "whole")
    assert onnxtrain.stats()["fallback_steps"] == steps
    return output


def state(path: Path) -> dict:
    return torch.load(path, weights_only=True)["model"]


def test_phase1(example, folder, phase1):
    """The log, the checkpoints and the graph that a run leaves."""
    entries = example.logs.read(folder / "whole.json")
    updates = [entry for entry in entries if isinstance(entry["step"], list) and entry["step"]]
    assert [entry["step"][1] for entry in updates] == [1, 2, 3, 4]
    assert [entry["data"]["learning_rate"] for entry in updates] == pytest.approx(
        [0.0, 0.02 * 0.25 / 0.3, 0.02 * 0.5**0.5, 0.02 * 0.25**0.5])
    assert set(entries[-1]["data"]) == {"e2e_train_time", "training_sequences_per_second", "final_loss",
                                        "raw_train_time"}
    names = {key for entry in entries if entry["step"] == "PARAMETER" for key in entry["data"]}
    assert names >= {"Config", "SEED", "train_start", "batch_size_per_gpu", "learning_rate", "checkpoint_step"}
    assert sorted(path.name for path in phase1.iterdir()) == ["ckpt_2.pt", "ckpt_4.pt", "phase1_bert.onnx"]
    model = onnx.load(phase1 / "phase1_bert.onnx")
    onnx.checker.check_model(model)
    assert model.opset_import[0].version == 12  # as ort_supplement asks for
    assert [value.name for value in model.graph.input] == ["input_ids", "segment_ids", "input_mask",
                                                           "masked_lm_labels", "next_sentence_labels"]
    state_now = state(phase1 / "ckpt_4.pt")
    assert state_now["Step"].item() == 5 and "Moment_1_cls.predictions.bias" in state_now


def test_first_loss(example, folder, phase1):
    """A step's loss is PyTorch's, of the scores of all tokens."""
    run = example.run_pretraining_ort
    (folder / "dropless.cfg").write_text(CONFIG.replace("0.1,", "0.0,"))
    arguments = run.parse_arguments([
        "--input_dir", str(folder / str(LENGTH)), "--config_file", str(folder / "dropless.cfg"), "--output_dir",
        str(folder / "dropless"), "--max_seq_length", str(LENGTH), "--max_predictions_per_seq", str(PREDICTIONS),
        "--train_batch_size", "8", "--do_train"])
    model, trainer, place, _, _ = run.prepare(arguments)
    data = example.hdf5_data.PretrainingFile(place.files[0], PREDICTIONS)
    batch = next(data.batches(8, 42))
    model.predictions = None  # scores of all tokens
    expected = model(*batch).item()
    model.predictions = PREDICTIONS
    loss, done = example.supplement.run_ort_training_step(arguments, 0, 1, trainer, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-5) and done == 1


def test_resume(example, folder, phase1):
    """A run in two parts ends where a run in one piece does, bit for bit, dropout and all."""
    parts = folder / "parts"
    parts.mkdir()
    (parts / "ckpt_2.pt").write_bytes((phase1 / "ckpt_2.pt").read_bytes())
    with pytest.raises(ValueError, match="--resume_from_checkpoint"):
        train(example, folder, "parts")
    train(example, folder, "parts", "--resume_from_checkpoint")
    whole, other = state(phase1 / "ckpt_4.pt"), state(parts / "ckpt_4.pt")
    assert whole.keys() == other.keys()
    assert [name for name in whole if not torch.equal(whole[name], other[name])] == []
    before = (parts / "ckpt_4.pt").read_bytes()
    train(example, folder, "parts", "--resume_from_checkpoint")  # nothing is left to do
    assert (parts / "ckpt_4.pt").read_bytes() == before


def test_two_processes_with_zero(example, folder, tmp_path):
    """By mpirun, with accumulation: the weights of one process that has the batches of both. Where one process was
    killed before its part of a checkpoint was whole, a run goes on from the checkpoint before, bit for bit.
    """
    if reason := without_mpi():
        pytest.skip(reason)
    (folder / "dropless.cfg").write_text(CONFIG.replace("0.1,", "0.0,"))
    given = ["--input_dir", str(folder / str(LENGTH)), "--config_file", str(folder / "dropless.cfg"),
             "--max_seq_length", str(LENGTH), "--max_predictions_per_seq", str(PREDICTIONS), "--train_batch_size", "8",
             "--gradient_accumulation_steps", "2", "--max_steps", "4", "--learning_rate", "0.02",
             "--warmup_proportion", "0.3", "--do_train", "--disable_progress_bar", "--num_steps_per_checkpoint", "2",
             "--json-summary", str(tmp_path / "log.json"), "--output_dir"]

    def run(output: Path, *options: str) -> dict:
        job = mpirun(2, [EXAMPLE / "run_pretraining_ort.py", *given, output, "--deepspeed_zero_stage",
                         "--allreduce_post_accumulation", *options])
        text, _ = job.communicate(timeout=300)
        assert job.returncode == 0, text
        parts = [state(output / f"ckpt_4.pt{end}") for end in ("", ".rank1")]
        return {**parts[1], **parts[0]}

    whole = run(tmp_path / "whole")
    moments = [sum(value.numel() for name, value in state(tmp_path / "whole" / f"ckpt_4.pt{end}").items()
                   if name.startswith("Moment")) for end in ("", ".rank1")]
    assert max(moments) <= 0.55 * sum(moments)

    runner = example.run_pretraining_ort
    arguments = runner.parse_arguments([*given, str(tmp_path / "alone")])
    arguments.gradient_accumulation_steps = 4
    _, trainer, place, _, _ = runner.prepare(arguments)

    def batches(rank: int):
        for turn in range(100):
            path = example.hdf5_data.file_of(place.files, turn, rank, 2)
            data = example.hdf5_data.PretrainingFile(path, PREDICTIONS)
            yield from data.batches(4, 42 + turn * 2 + rank)

    streams, updates = (batches(0), batches(1)), 0
    for step in range(1, 17):
        batch = next(streams[step % 2])
        _, updates = example.supplement.run_ort_training_step(arguments, updates, step, trainer, batch)
    alone = trainer.state_dict()
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.seq_relationship.weight"):
        torch.testing.assert_close(whole[name], alone[name], rtol=1e-4, atol=1e-5)
    assert updates == 4 and any(not torch.equal(alone[name], value)
                                for name, value in state(tmp_path / "whole" / "ckpt_2.pt").items() if name in alone)

    (tmp_path / "killed").mkdir()
    for path in (tmp_path / "whole").glob("ckpt_*"):
        if path.name != "ckpt_4.pt.rank1":
            (tmp_path / "killed" / path.name).write_bytes(path.read_bytes())
    again = run(tmp_path / "killed", "--resume_from_checkpoint")
    assert again.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(whole[name], again[name])] == []


def test_phase2_and_after(example, folder, phase1, capsys, monkeypatch):
    """Phase 2 from phase 1's weights and moments; plot, conversion, fine-tuning."""
    output = train(example, folder, "whole", "--phase2", "--resume_from_checkpoint", "--phase1_end_step", "4",
                   length=2 * LENGTH, steps=2)
    assert "throughput =  " in capsys.readouterr().out
    assert (output / "ckpt_6.pt").exists() and (output / "final_bert.onnx").exists()
    assert state(output / "ckpt_6.pt")["Step"].item() == 7
    example.plot.draw(folder / "whole.json", folder / "loss.png")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    found = example.convert_checkpoint.converted(torch.load(output / "ckpt_6.pt", weights_only=True))
    assert found and all(name.startswith("bert.") for name in found)
    torch.save({"model": found}, folder / "bert.pt")
    monkeypatch.setattr(sys, "argv", [
        "run_classifier_ort.py", "--make_pairs", str(folder), "--train_file", str(folder / "train.tsv"), "--eval_file",
        str(folder / "eval.tsv"), "--vocab_file", str(folder / "vocab.txt"), "--config_file",
        str(folder / "config.json"), "--init_checkpoint", str(folder / "bert.pt"), "--max_seq_length", "16",
        "--num_train_epochs", "1", "--train_batch_size", "250", "--output_file", str(folder / "evaluation.json")])
    example.run_classifier_ort.main()
    results = json.loads((folder / "evaluation.json").read_text())
    assert set(results) == {"loss", "accuracy", "f1"} and 0 < results["loss"] < 2 and 0 <= results["accuracy"] <= 1


def test_other_libraries(example, folder):
    """The body is BERT: transformers' model with these weights gives the same states."""
    transformers = pytest.importorskip("transformers")
    config = example.modeling.BertConfig.from_json(folder / "config.json").padded()
    ours = example.modeling.BertForPreTraining(config).eval()
    theirs = transformers.BertModel(transformers.BertConfig(**vars(config))).eval()
    weights = example.convert_checkpoint.converted(ours.state_dict())
    wrong = theirs.load_state_dict({name[5:]: value for name, value in weights.items()}, strict=False)
    assert not wrong.unexpected_keys and all("_ids" in name for name in wrong.missing_keys)
    ids, segments, mask = torch.randint(5, 100, (2, 12)), torch.randint(0, 2, (2, 12)), torch.ones(2, 12).long()
    mask[1, 7:] = 0
    with torch.no_grad():
        states, pooled = ours.bert(ids, segments, mask)
        found = theirs(input_ids=ids, token_type_ids=segments, attention_mask=mask)
    torch.testing.assert_close(states[mask == 1], found[0][mask == 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pooled, found[1], rtol=1e-4, atol=1e-5)


def test_rates(example):
    args = Namespace(max_steps=100.0, learning_rate=2.0, warmup_proportion=0.2)

    def rate(step, schedule):
        return example.supplement.get_lr(args, step, schedule)

    for schedule in example.supplement.SCHEDULES:
        assert rate(0, schedule) == 0 and rate(10, schedule) == pytest.approx(1.0)
    assert rate(36, "warmup_poly") == pytest.approx(1.6) and rate(100, "warmup_poly") == 0
    assert rate(60, "warmup_constant") == 2
    assert rate(60, "warmup_linear") == pytest.approx(1.0)
    assert rate(50, "warmup_cosine") == pytest.approx(1.0)
    args.max_steps = -1
    assert rate(7, "warmup_poly") == 2


def test_files_of_processes(example):
    """Every file is read by one process a round, or by several whose turns change."""
    of = example.hdf5_data.file_of
    files = list("abcdef")
    assert [of(files, turn, rank, 2) for turn in range(3) for rank in range(2)] == files
    for world in (3, 4):  # more processes than files
        assert {of(["a", "b"], turn, 0, world) for turn in range(2)} == {"a", "b"}
        assert {of(["a", "b"], 0, rank, world) for rank in range(world)} == {"a", "b"}


def test_reading(example, folder):
    """Labels are -1 but where a token is masked; the batches of one order are all rows once."""
    data = example.hdf5_data.PretrainingFile(folder / str(LENGTH) / "text_training_0.hdf5", PREDICTIONS)
    batches = list(data.batches(4, 1))
    assert len(batches) == len(data) // 4
    for left, right in zip(batches[2:], data.batches(4, 1, skip=2)):
        assert all(torch.equal(one, other) for one, other in zip(left, right))
    ids, _, mask, labels, _ = data.batch(torch.arange(len(data)))
    counts = (labels >= 0).sum(1)
    assert (labels[:, 0] == -1).all() and (labels[mask == 0] == -1).all()
    assert torch.equal(counts, (mask.sum(1) * 0.15).round().clamp(1, PREDICTIONS).long())


@pytest.mark.parametrize("options, error, message", [
    (["--train_batch_size", "7", "--gradient_accumulation_steps", "2"], ValueError, "no multiple"),
    (["--max_seq_length", "64"], ValueError, "positions"),
    (["--resume_from_checkpoint"], FileNotFoundError, "to go on from"),
    (["--input_dir", str(EXAMPLE / "ort_supplement")], FileNotFoundError, "'training'"),
])
def test_refusals(example, folder, tmp_path, options, error, message):
    run = example.run_pretraining_ort
    with pytest.raises(error, match=message):
        run.prepare(run.parse_arguments(["--input_dir", str(folder / str(LENGTH)), "--config_file",
                                         str(folder / "config.json"), "--output_dir", str(tmp_path), "--do_train",
                                         "--max_seq_length", str(LENGTH), *options]))


def shell(tmp_path: Path, *positional: str) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
    """run_pretraining_ort.sh with a Python that notes its arguments."""
    noting = tmp_path / "python"
    noting.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    noting.chmod(0o755)
    done = subprocess.run(["bash", str(EXAMPLE / "run_pretraining_ort.sh"), *positional], capture_output=True, text=True,
                          env={**os.environ, "PYTHON": str(noting), "RESULTS_DIR": str(tmp_path / "results")})
    calls = tmp_path / "calls"
    return done, [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []


def test_shell(tmp_path):
    """All positional arguments reach the phase that they are of."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    done, calls = shell(tmp_path, "64", "1e-3", "fp16", "1", "0.1", "70", "20", "false", "true", "true", "4", "7", "job",
                        "true", "true", "", "32", "2e-3", "0.2", "30", "8", str(one), str(two), str(EXAMPLE), "w.pt",
                        "16", "true")
    assert done.returncode == 0, done.stderr
    found = [{call[i]: call[i + 1] if i + 1 < len(call) else "" for i in range(len(call))} for call in calls]
    shared = {"--num_steps_per_checkpoint": "20", "--seed": "7", "--gpu_memory_limit_gb": "16"}
    for call, expected in zip(found, (
            {"--train_batch_size": "64", "--learning_rate": "1e-3", "--warmup_proportion": "0.1", "--max_steps": "70",
             "--gradient_accumulation_steps": "4", "--input_dir": str(one), "--init_checkpoint": "w.pt",
             "--max_seq_length": "128", "--max_predictions_per_seq": "20", **shared},
            {"--train_batch_size": "32", "--learning_rate": "2e-3", "--warmup_proportion": "0.2", "--max_steps": "30",
             "--gradient_accumulation_steps": "8", "--input_dir": str(two), "--phase1_end_step": "70",
             "--max_seq_length": "512", "--max_predictions_per_seq": "80", **shared})):
        assert {name: call.get(name) for name in expected} == expected
        assert {"--fp16", "--allreduce_post_accumulation", "--allreduce_post_accumulation_fp16",
                "--deepspeed_zero_stage", "--do_train"} <= set(call)
    assert ["--phase2" in call for call in found] == [False, True] == ["--resume_from_checkpoint" in call
                                                                      for call in found]
    logs = sorted(path.name for path in (tmp_path / "results").glob("*.log"))
    assert [name.rsplit(".", 2)[0] for name in logs] == [f"job.pyt_bert_pretraining_phase{n}_fp16_gbs{b}"
                                                         for n, b in ((1, 64), (2, 32))]
    done, calls = shell(tmp_path, "64", "1e-3", "bf16")
    assert done.returncode == 2 and "precision" in done.stderr and len(calls) == 2
