"""What a run leaves is read back; the reference evaluator runs its ONNX file."""

from __future__ import annotations

import json

import onnx.reference
import pytest
import torch
import transformers
from language_models import TEXTS, model_of, tokenizer_of

from onnxtrain import finetune

pytest.importorskip("gguf")


def test_the_command(capfd, tmp_path):
    model_of().save_pretrained(tmp_path / "base")
    tokenizer_of().save_pretrained(tmp_path / "base")
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    status = finetune.main(["--model", str(tmp_path / "base"), "--data", str(tmp_path / "data.jsonl"), "--base",
                            "float32", "--learning-rate", "0.01", "--max-steps", "2",
                            *(f"--{each}={tmp_path / each}" for each in ("out", "merged", "gguf", "onnx"))])
    text = "".join(capfd.readouterr())
    assert status == 0 and text.count("read back") == 3 and "checked by onnx" in text
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(60).reshape(3, 20)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0

    (logits,) = onnx.reference.ReferenceEvaluator(str(tmp_path / "onnx/model.onnx")).run(
        None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    wanted = merged(input_ids=ids, attention_mask=mask).logits.detach()
    torch.testing.assert_close(torch.tensor(logits)[mask == 1], wanted[mask == 1], rtol=1e-3, atol=1e-4)


def test_the_command_refuses_before_it_trains(capfd, tmp_path):
    model_of("Mistral", sliding_window=16).save_pretrained(tmp_path / "base")
    tokenizer_of().save_pretrained(tmp_path / "base")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": TEXTS[0]}))
    status = finetune.main(["--model", str(tmp_path / "base"), "--data", str(tmp_path / "data.jsonl"), "--out",
                            str(tmp_path / "out"), "--gguf", str(tmp_path / "gguf")])
    text = "".join(capfd.readouterr())
    assert status == 1 and "--gguf: llama.cpp has no sliding window" in text and "update" not in text
