"""What a run says: lines of JSON in the form of NVIDIA's dllogger, the same as text, and TensorBoard's files."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any


class Log:
    """The log of one process; of all but the first nothing is written.

    Args:
        path: of the JSON file, which is added to; each line starts with "DLLL ".
        rank: of this process.
        board: a folder for TensorBoard, or None.
    """

    def __init__(self, path: Path, rank: int = 0, board: str | None = None) -> None:
        self._start = time.time()
        self._file = self._board = None
        if rank:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if board is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
                self._board = SummaryWriter(board)
            except ImportError:
                print("tensorboard is not installed: --tensorboard_dir has no effect")

    def __call__(self, step: str | tuple[int, ...], data: dict[str, Any]) -> None:
        """Data of "PARAMETER", of (epoch, update), or of the whole run, which is ()."""
        if self._file is None:
            return
        now = time.time()
        stamp = datetime.datetime.fromtimestamp(now)
        entry = {"timestamp": str(now), "datetime": str(stamp), "elapsedtime": str(now - self._start), "type": "LOG",
                 "step": step, "data": data}
        self._file.write(f"DLLL {json.dumps(entry)}\n")
        self._file.flush()
        where = step if isinstance(step, str) else "".join(
            f"{name}: {value} " for name, value in zip(("Epoch", "Iteration"), step)).strip()
        print(f"DLL {stamp} - {where} " + " ".join(f" {name} : {value}" for name, value in data.items()), flush=True)
        if self._board is not None and not isinstance(step, str) and len(step) == 2:
            for name, value in data.items():
                self._board.add_scalar(name, value, step[1])

    def close(self) -> None:
        for each in (self._file, self._board):
            if each is not None:
                each.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a file."""
    return [json.loads(line[5:]) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("DLLL ")]
