"""Files of ORTMODULE_CACHE_DIR are written beside and renamed: another process sees the old one or the whole new one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path`, whose folder is made, when the block ends. Nothing is left of it where the block,
    or the disk, fails.

    Raises:
        OSError: the disk's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False)
    try:
        with file:
            yield file
        os.replace(file.name, path)
    except BaseException:
        os.unlink(file.name)
        raise
