"""Lines of data that are refused in one sentence, and batches."""

from __future__ import annotations

import pytest
import torch
from finetune_command import run

from onnxtrain.finetune.data import batch_of


@pytest.mark.parametrize("line, says", [
    ("{", "line 1 is no JSON"), ('{"texts": "a"}', "line 1 is no object with text"), ("", "no example"),
    ('{"messages": []}', "line 1 is no object"), ('{"messages": ["a"]}', "line 1: the chat template refuses"),
    ('{"prompt": "the", "completion": ""}', None),
])
def test_bad_data(line, says, capfd, folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text(line)
    status, text = run(capfd, folder, tmp_path / "bad.jsonl", tmp_path / "out", "--max-steps", "1")
    assert (status, f"finetune: {tmp_path}" in text and says in text) == (1, True) if says else status == 0
    assert not says or not (tmp_path / "out").exists()


def test_a_batch_is_padded():
    batch = batch_of([{"input_ids": [1] * 65, "labels": [1] * 65}, {"input_ids": [2, 3], "labels": [-100, 3]}], 7)
    assert {name: tuple(each.shape) for name, each in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (2, 128))
    assert batch["input_ids"][1, :3].tolist() == [2, 3, 7] and batch["labels"][1, :3].tolist() == [-100, 3, -100]
    assert torch.equal(batch["attention_mask"].sum(1), torch.tensor([65, 2]))
