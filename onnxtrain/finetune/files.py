"""What a user of fine-tuning has to change, and files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


class FinetuneError(Exception):
    """What the user has to change, in a sentence."""


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Errors of the disk, as the libraries that write to it raise them, are FinetuneErrors."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise FinetuneError(f"{folder} cannot be written: {error}") from error
    except RuntimeError as error:  # of torch.save, which has no class of its own for it
        if torch.serialization.__file__ not in {frame.filename for frame in traceback.extract_tb(error.__traceback__)}:
            raise
        raise FinetuneError(f"{folder} cannot be written: {error}") from error


def replacing(folder: Path, save: Callable[[Path], object]) -> None:
    """Files that save() writes to a folder come to this one once all are written."""
    part = folder / ".part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        with writing(folder):
            part.mkdir(parents=True)
            save(part)
            for file in part.iterdir():
                os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def checkpoints(out: Path) -> list[Path]:
    """Those that are whole; of others, which a full disk or a kill has left, nothing stays."""
    found = [path for path in out.glob("checkpoint-*") if path.is_dir()]
    whole = [path for path in found if (path / "trainer_state.json").exists()]  # which Trainer writes last
    for path in set(found).difference(whole):
        shutil.rmtree(path)
    return whole
