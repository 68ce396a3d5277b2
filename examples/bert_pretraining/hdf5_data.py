"""Reads the HDF5 files of create_pretraining_data.py as tensors, and says which file a process reads when."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import h5py
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class PretrainingFile:
    """One file, in memory.

    Args:
        path: of the file.
        predictions: masked tokens that are read of an instance, at most.

    Raises:
        ValueError: it lacks a dataset, or their lengths differ.
    """

    NAMES = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")

    def __init__(self, path: str | os.PathLike[str], predictions: int) -> None:
        with h5py.File(path, "r") as file:
            missing = [name for name in self.NAMES if name not in file]
            if missing:
                raise ValueError(f"{path} has no {', '.join(missing)}")
            self._data = {name: torch.from_numpy(file[name][:]) for name in self.NAMES}
        lengths = {name: len(value) for name, value in self._data.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"{path}: the datasets have different lengths: {lengths}")
        self._predictions = predictions

    def __len__(self) -> int:
        return len(self._data["input_ids"])

    def batch(self, rows: Tensor) -> Batch:
        """Ids, segments, mask, labels (rows, length), -1 where nothing is masked, next sentence (rows,); all int64."""
        found = {name: value[rows].long() for name, value in self._data.items()}
        positions = found["masked_lm_positions"][:, :self._predictions]
        labels = torch.full_like(found["input_ids"], -1)
        # Padding has the position 0, which is [CLS] and never masked.
        labels.scatter_(1, positions, found["masked_lm_ids"][:, :self._predictions])
        labels[:, 0] = -1
        return (found["input_ids"], found["segment_ids"], found["input_mask"], labels, found["next_sentence_labels"])

    def batches(self, size: int, seed: int, skip: int = 0) -> Iterator[Batch]:
        """All rows in random order, a last short batch left out; without the first `skip` batches."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        for place in range(skip, len(self) // size):
            yield self.batch(order[place * size:(place + 1) * size])


def training_files(folder: str | os.PathLike[str], seed: int) -> list[str]:
    """Paths of the files with "training" in their names, shuffled.

    Raises:
        FileNotFoundError: there are none.
    """
    files = sorted(str(path) for path in Path(folder).iterdir() if path.is_file() and "training" in path.name)
    if not files:
        raise FileNotFoundError(f"{folder} has no file with 'training' in its name")
    random.Random(seed).shuffle(files)
    return files


def file_of(files: list[str], turn: int, rank: int, world: int) -> str:
    """The file that a process reads in a turn: each has its own, or where there are more processes than files all read
    every file in turn, as many processes one as another.
    """
    return files[(turn * world + rank if world <= len(files) else turn + rank) % len(files)]
