"""Imports timm for tests, with a torchvision that no other test finds; without it, pytest skips the file that imports
this.
"""

import contextlib
import pathlib
import sys

import pytest
import torch

# tests/setup.sh puts timm here, apart, with a torchvision that is not to be found by others.
sys.path.append(str(pathlib.Path(sys.prefix) / "vision"))
try:
    with contextlib.suppress(ImportError):
        import torchvision  # noqa: F401
except RuntimeError:  # its operators, which are not used here, want a torch with CUDA: declared, it is imported without
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
try:
    timm = pytest.importorskip("timm")
finally:
    sys.path.pop()
    for _name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[_name]
