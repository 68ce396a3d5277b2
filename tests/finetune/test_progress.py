"""A run that is interrupted goes on to the same weights."""

from __future__ import annotations

import signal

import torch
from finetune_command import losses, run, weights

from onnxtrain import finetune


def test_goes_on_after_an_interruption(capfd, folder, data, tmp_path, monkeypatch):
    run(capfd, folder, data, tmp_path / "whole")
    plain, batches = finetune.batch_of, []

    def interrupting(*args):
        batches.append(args)
        if len(batches) == 7:
            signal.raise_signal(signal.SIGINT)
        return plain(*args)

    monkeypatch.setattr(finetune, "batch_of", interrupting)
    status, text = run(capfd, folder, data, tmp_path / "parts")
    assert status == 0 and "Ctrl-C" in text and "the same command goes on" in text and len(losses(text)) < 12
    assert not (tmp_path / "parts" / "adapter_model.safetensors").exists()
    status, rest = run(capfd, folder, data, tmp_path / "parts")
    assert status == 0 and "goes on from there" in rest and len(losses(text)) + len(losses(rest)) == 12
    for name, value in weights(tmp_path / "parts").items():
        torch.testing.assert_close(value, weights(tmp_path / "whole")[name], msg=name)
