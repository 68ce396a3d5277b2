"""Random states, devices, dtypes and modules by file have the helpers that scripts import."""

import random
import sys

import numpy as np
import onnx
import pytest
import torch

from onnxtrain.training import _utils as of_training


def test_random_states_and_devices():
    from onnxtrain.ortmodule import _utils

    states = _utils.get_random_states()
    first = random.random(), np.random.rand(), torch.rand(1)
    _utils.set_random_states(states)
    assert (random.random(), np.random.rand(), torch.rand(1)) == first
    assert _utils.get_device_str("cpu") == _utils.get_device_str(torch.device("cpu")) == "cpu"
    assert _utils.get_device_str("cuda:1") == "cuda:1" and _utils.get_device_index("cuda:1") == 1


def test_dtypes_and_modules_by_file(tmp_path, monkeypatch):
    assert of_training.dtype_onnx_to_torch(onnx.TensorProto.BFLOAT16) == torch.bfloat16
    with pytest.raises(KeyError):
        of_training.dtype_onnx_to_torch(onnx.TensorProto.STRING)
    (tmp_path / "of_a_test.py").write_text("NAME = __name__\n")
    for given, name in ((None, "of_a_test"), ("another_of_a_test", "another_of_a_test")):
        monkeypatch.setitem(sys.modules, name, None)
        module = of_training.import_module_from_file(str(tmp_path / "of_a_test.py"), given)
        assert module.NAME == name and sys.modules[name] is module
    with pytest.raises(FileNotFoundError):
        of_training.import_module_from_file(str(tmp_path / "nope.py"))
