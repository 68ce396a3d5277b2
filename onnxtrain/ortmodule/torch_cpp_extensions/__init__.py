"""Extensions that other runtimes have to compile: here there is nothing to install."""

from __future__ import annotations


def is_installed(path: str | None = None) -> bool:
    """True: what they did is part of onnxtrain's wheel."""
    return True
