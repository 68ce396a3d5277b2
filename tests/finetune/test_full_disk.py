"""Files are whole or not there."""

from __future__ import annotations

import resource
import signal

import pytest
from finetune_command import losses, run, weights


@pytest.mark.parametrize("most", [1000, 30_000, 60_000, 110_000])
def test_a_full_disk(most, capfd, folder, data, tmp_path):
    """A file that may not grow fails as one on a full disk; the adapter, the optimizer's state, or another one is the
    first that is too long."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    plain = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        status, text = run(capfd, folder, data, tmp_path / "out", "--save-steps", "3", "--max-steps", "4", "--lora-r", "16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, plain)
    assert status == 1 and text.count("finetune: ") == 1 and f"{tmp_path / 'out'} cannot be written" in text
    status, text = run(capfd, folder, data, tmp_path / "out", "--save-steps", "3", "--max-steps", "4", "--lora-r", "16")
    assert status == 0 and len(losses(text)) == 4 and weights(tmp_path / "out")
