"""`import onnxtrain.compat.onnxruntime` makes `onnxruntime.training` and its submodules importable: they are
onnxtrain's (_alias.py).

`python -m onnxtrain run script.py` does the same for a script that shall not be edited, and `python -m onnxtrain alias
on` for all scripts of an environment. Where no onnxruntime is installed, the names of this file are `onnxruntime`'s.
"""

from __future__ import annotations

import enum

from onnxtrain.compat._alias import install
from onnxtrain.compat._pybind_state import set_seed
from onnxtrain.training.step import trainer

__all__ = ["GraphOptimizationLevel", "SessionOptions", "__version__", "install", "set_seed", "trainer"]
__version__ = "1.19.2"  # whose surface this is


class GraphOptimizationLevel(enum.IntEnum):
    """Kept for scripts that name it."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_ALL = 99


class SessionOptions:
    """Kept for scripts that set attributes of it, and give it to ORTTrainerOptions: none has an effect."""


install()
