"""Word-level corpora as tensors of token ids: Wikitext-2 files, or the text of Python's standard library.

`load(folder)` reads train.txt, valid.txt and test.txt. Where there is no train.txt, it trains on test.txt.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LIBRARY_BYTES = 2_000_000  # of the standard library, when there is no corpus


class Vocabulary:
    """Words in the order in which they are first seen; words unknown when frozen map to <unk>."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {"<unk>": 0, "<eos>": 1}

    def __len__(self) -> int:
        return len(self.index)

    def encode(self, text: str, grow: bool) -> Tensor:
        ids = []
        for line in text.splitlines():
            for word in (*line.split(), "<eos>"):
                if grow:
                    ids.append(self.index.setdefault(word, len(self.index)))
                else:
                    ids.append(self.index.get(word, 0))
        return torch.tensor(ids, dtype=torch.long)


def _standard_library() -> tuple[str, str]:
    """Training and validation text: sources of the installed Python, in alphabetical order, rare words as <unk>."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) > LIBRARY_BYTES:
            break
    words = re.findall(r"[A-Za-z_]+|\n|[^\sA-Za-z_]", text[:LIBRARY_BYTES])
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    text = " ".join(word if counts[word] > 2 else "<unk>" for word in words)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def default_folder() -> Path | None:
    """A wikitext-2 folder beside the repository, where there is one."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "wikitext-2"
    return folder if (folder / "valid.txt").exists() else None


def load(folder: Path | None) -> tuple[Tensor, Tensor, int, str]:
    """Training ids, validation ids, vocabulary size, and the corpus's name. FileNotFoundError names what is missing."""
    vocabulary = Vocabulary()
    if folder is None:
        train, valid = _standard_library()
        name = "Python's standard library"
    else:
        source = folder / "train.txt"
        if not source.exists():
            source = folder / "test.txt"
        train, valid = source.read_text(encoding="utf-8"), (folder / "valid.txt").read_text(encoding="utf-8")
        name = f"{folder.name} ({source.name})"
    train_ids = vocabulary.encode(train, grow=True)
    valid_ids = vocabulary.encode(valid, grow=folder is not None)
    return train_ids, valid_ids, len(vocabulary), name


def batchify(ids: Tensor, batch: int) -> Tensor:
    """(tokens,) to (tokens // batch, batch): columns are consecutive text."""
    rows = ids.numel() // batch
    return ids[: rows * batch].view(batch, rows).t().contiguous()


def get_batch(source: Tensor, start: int, bptt: int) -> tuple[Tensor, Tensor]:
    """Inputs (length, batch) and flat targets (length * batch,), one token later."""
    length = min(bptt, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length].reshape(-1)
