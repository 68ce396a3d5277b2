"""Which kernels of products won, kept on disk beside exports: the next process on the same machine knows them.

Only in a folder that the user names: what was measured while other programs used the processor stays wrong for every
process that reads it, which is not to happen unasked.

The name of the file says what a measurement depends on but its sizes and threads, which are in each line: processor,
versions, instructions. Whatever is in it, products are right; a foreign file costs time.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import platform
from pathlib import Path

import torch

from onnxtrain import _C, options
from onnxtrain._export import files

_log = logging.getLogger("onnxtrain")
FORMAT = 2
MAX_BYTES = 1 << 20
_written: dict[str, str] = {}  # by folder: what is in its file, as far as this process knows


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("model name", "CPU part"))),
                platform.processor() or platform.machine())


def _is_default(folder: str) -> bool:
    return folder == options.default_cache()


def path(folder: str) -> Path:
    """The file of this machine in the folder."""
    parts = [FORMAT, torch.__version__, _C.__version__, _C.ISA, _processor(), os.cpu_count()]
    return Path(folder) / f"products-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.txt"


def _read(folder: str) -> str:
    try:
        return files.content(path(folder), MAX_BYTES).decode(errors="replace").replace("\0", " ")
    except FileNotFoundError:
        return ""
    except OSError as error:
        _log.log(files.level(folder), "ORTModule cannot read GEMM measurements from %s: %s", folder, error)
        return ""


def recall(folder: str) -> None:
    """Reads the folder's file, once a process, and writes once more when the process ends: kernels compete in steps'
    first runs, without a word to Python."""
    if folder in _written or _is_default(folder) or not files.usable(folder):
        return
    _written[folder] = _read(folder)
    learnt = _C.remember_products(_written[folder])
    _log.info("ORTModule read the measurements of %d kinds of matrix products from %s", learnt, folder)
    atexit.register(_at_exit, folder)


def _at_exit(folder: str) -> None:
    if os.path.isdir(folder):  # else it was a temporary one
        keep(folder)


def keep(folder: str) -> None:
    """Writes the folder's file where something was measured since; failures of the disk are logged, never raised."""
    if _C.measured_products() == _written.get(folder) or _is_default(folder) or not files.usable(folder):
        return
    _C.remember_products(_read(folder))  # of processes that ran beside this one
    text = _C.measured_products()
    try:
        with files.replacing(path(folder)) as file:
            file.write(text.encode())
        _written[folder] = text
    except OSError as error:
        _log.log(files.level(folder), "ORTModule cannot write measurements of matrix products to %s: %s", folder, error)
