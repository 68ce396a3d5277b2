"""The process-wide switch for torch.autograd.Function in wrapped modules."""

from __future__ import annotations

import os


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """For modules wrapped from now on; the same as setting ORTMODULE_ENABLE_CUSTOM_AUTOGRAD."""
    os.environ["ORTMODULE_ENABLE_CUSTOM_AUTOGRAD"] = "1" if to_enable else "0"
