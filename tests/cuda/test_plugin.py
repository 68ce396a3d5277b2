"""A plugin that cannot be opened, and a device that no plugin has, are named."""

from __future__ import annotations

import pytest

from onnxtrain import _C


def test_names_of_devices():
    with pytest.raises(ValueError, match="no device 'tpu'"):
        _C.Session(b"", 1, "tpu")
    with pytest.raises(ValueError, match="expected a kind and a number"):
        _C.Session(b"", 1, "cuda:x")
    with pytest.raises(OSError, match="nowhere.so"):
        _C.open_plugin("/nowhere.so")
