"""Files of ORTMODULE_CACHE_DIR: whose they may be, how they are read, and that they are written beside and renamed.

A graph from disk decides what a module trains on, so no other user may be able to write one: the folder and each file
belong to the user of this process, and no other may write to them. A folder that does not exist is made so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from onnxtrain import options

_log = logging.getLogger("onnxtrain")
_TEMPORARY = ".onnxtrain-"
_ABANDONED = 3600.0  # seconds after which what a process was writing is left over from one that was killed
_said: set[str] = set()


def _refusal(found: os.stat_result) -> str | None:
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and this process runs as {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o}); run `chmod go-w` on it"
    return None


def level(folder: str) -> int:
    """The log level for a folder that cannot be used: INFO for the default one, which the user did not ask for."""
    return logging.INFO if folder == options.default_cache() else logging.WARNING


def usable(folder: str) -> bool:
    """Whether the folder is ours alone to write, or not there yet. Why not is logged, once a process."""
    try:
        reason = _refusal(os.stat(folder))
    except OSError:
        return True  # what uses it says so
    if reason is not None and folder not in _said:
        _said.add(folder)
        _log.log(level(folder), "ORTModule does not use ORTMODULE_CACHE_DIR=%s: %s", folder, reason)
    return reason is None


def content(path: Path, limit: int) -> bytes:
    """The file's first `limit` bytes.

    Raises:
        OSError: the disk's.
        PermissionError: others own it, or may write to it.
    """
    with path.open("rb") as file:
        reason = _refusal(os.fstat(file.fileno()))
        if reason is not None:
            raise PermissionError(f"{path}: {reason}")
        return file.read(limit)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path`, whose folder is made, when the block ends. Nothing is left of it where the
    block, or the disk, fails.

    Raises:
        OSError: the disk's.
    """
    if not path.parent.exists():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
    file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=_TEMPORARY, delete=False)  # noqa: SIM115
    try:
        with file:
            yield file
        os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # another process took it for left over
            os.unlink(file.name)
        raise


def _listed(folder: Path, pattern: str) -> list[tuple[float, int, Path]]:
    """(time of the last use, bytes, path), newest first. Other processes may remove files meanwhile."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    return sorted(found, reverse=True)


def newest(folder: Path, pattern: str) -> list[Path]:
    """Files by the time that they were used last."""
    return [path for _, _, path in _listed(folder, pattern)]


def used(path: Path) -> None:
    """Makes it the newest."""
    with contextlib.suppress(OSError):
        os.utime(path)


def evict(folder: Path, pattern: str, count: int | None = None, size: int | None = None) -> None:
    """Removes the files that were used longest ago: beyond `count`, or beyond `size` bytes together; and what killed
    processes were writing. The newest stays.

    Raises:
        OSError: the disk's.
    """
    total = 0
    for index, (_, length, path) in enumerate(_listed(folder, pattern)):
        total += length
        if index and (count is not None and index >= count or size is not None and total > size):
            path.unlink(missing_ok=True)
    clear(folder)


def clear(folder: Path) -> None:
    """Removes what killed processes were writing.

    Raises:
        OSError: the disk's.
    """
    for when, _, path in _listed(folder, _TEMPORARY + "*"):
        if when < time.time() - _ABANDONED:
            path.unlink(missing_ok=True)
