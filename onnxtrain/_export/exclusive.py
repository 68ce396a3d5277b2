"""One export at a time in a process.

Entered by ortmodule/_runner.py around export and comparison. A thread that calls an ORTModule meanwhile waits: the
module that is being exported may be its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from onnxtrain import _torch

_lock = threading.RLock()
owner: int | None = None  # the exporting thread


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Holds the process's export lock. Hooks that the caller has on saved tensors (checkpoint's) do not see the
    export.
    """
    global owner
    set_tracing = _torch.saved_tensors_hooks_set_tracing
    with _torch.compile_lock, _lock:  # Dynamo, in another thread, would read what is patched
        before, owner = owner, threading.get_ident()
        traced = set_tracing(True) if set_tracing is not None else None
        try:
            yield
        finally:
            owner = before
            if set_tracing is not None:
                set_tracing(bool(traced))


def here() -> bool:
    """Whether this thread is exporting."""
    return owner == threading.get_ident()


def wait() -> None:
    """Until no other thread exports."""
    if owner is not None and not here():
        with _lock:
            pass


def _after_fork() -> None:
    """The thread that held the locks, torch's among them, is not in the child, unless it is the one that forked."""
    global _lock, owner
    convert_frame = sys.modules.get(_torch.TABLE["convert_frame"].dotted())
    if owner is not None and not here():
        _lock, owner = threading.RLock(), None
    if convert_frame is not None and not convert_frame.compile_lock._is_owned():
        convert_frame.compile_lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
