"""`python -m onnxtrain finetune` on a tiny Llama with a tokenizer of its own: the losses of plain Trainer, an adapter and a
merged model that are read back, and what the user did wrong in one sentence.
"""

from __future__ import annotations

import json

import peft
import pytest
import torch
import transformers
from finetune_command import losses, run, weights

import onnxtrain.integrations


def test_losses_are_those_of_trainer_alone(capfd, folder, data, tmp_path, monkeypatch):
    status, text = run(capfd, folder, data, tmp_path / "ours", "--merged", str(tmp_path / "merged"))
    assert status == 0 and "12 examples" in text and "update 12 of 12" in text and "tokens/s" in text
    assert not list((tmp_path / "ours").glob("checkpoint-*")) and not (tmp_path / "ours" / ".part").exists()

    wrapped = []
    monkeypatch.setattr(onnxtrain.integrations, "wrap_trainer", lambda trainer: wrapped.append(trainer) or trainer)
    _, plain = run(capfd, folder, data, tmp_path / "plain")
    assert wrapped and losses(text) == pytest.approx(losses(plain), rel=2e-3) and losses(text)[-1] < losses(text)[0] - 0.3
    for name, ours in weights(tmp_path / "ours").items():
        torch.testing.assert_close(ours, weights(tmp_path / "plain")[name], rtol=0.02, atol=2e-3, msg=name)

    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-3, atol=1e-4)


def test_adapters_of_other_kinds(capfd, folder, data, tmp_path):
    status, text = run(capfd, folder, data, tmp_path / "out", "--use-dora", "--use_rslora", "--modules-to-save", "lm_head",
                       "--target-modules", "q_proj,v_proj", "--lora-dropout", "0.1", "--max-steps", "2")
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert status == 0 and settings["use_dora"] and settings["use_rslora"] and settings["modules_to_save"] == ["lm_head"]
    assert sorted(settings["target_modules"]) == ["q_proj", "v_proj"] and any("magnitude" in name for name in weights(
        tmp_path / "out"))


def test_four_bits(capfd, folder, data, tmp_path):
    pytest.importorskip("bitsandbytes")
    status, text = run(capfd, folder, data, tmp_path / "out", "--base", "nf4", "--merged", str(tmp_path / "merged"),
                       "--max-steps", "3")
    assert status == 0 and "in nf4" in text and "read back" in text and (tmp_path / "merged" / "config.json").exists()


def test_bad_options(capfd, folder, data, tmp_path):
    for more, says in ((["--target-modules", "q_prod"], "--target-modules q_prod"),
                       (["--model", str(tmp_path / "none")], "cannot be loaded"), (["--memory", "half"], "--memory: ")):
        status, text = run(capfd, folder, data, tmp_path / "out", *more)
        assert status == 1 and says in text and text.count("finetune: ") == 1
    (tmp_path / "file").write_text("")
    status, text = run(capfd, folder, data, tmp_path / "file", "--max-steps", "1")
    assert status == 1 and "cannot be written" in text
