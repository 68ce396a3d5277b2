"""Nested dicts of arrays and numbers are written to files of HDF5 and read again, or h5py is asked for."""

import os

import numpy as np
import pytest
import torch
from test_training_checkpoints import ready


def test_without_h5py(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match="h5py must be installed"):
        ready().save_checkpoint(str(tmp_path / "a"))
    assert not list(tmp_path.iterdir())


class TestHdf5:
    def test_storage(self, tmp_path):
        from onnxtrain.training import _checkpoint_storage as storage

        value = {"a": {"b": {"c": np.arange(6).reshape(2, 3)}, "n": 3, "f": 0.5, "flag": True, "s": "text", "l": [1, 2]}, "e": {},
                 "t": torch.ones(2)}
        path = tmp_path / "a"
        storage.save(value, path)
        found = storage.load(path)
        np.testing.assert_equal(found["a"], {"b": {"c": np.arange(6).reshape(2, 3)}, "n": 3, "f": 0.5, "flag": True,
                                             "s": b"text", "l": np.array([1, 2])})
        assert found["e"] == {} and found["t"].tolist() == [1, 1]
        assert storage.load(path, key="a/b/")["c"].shape == (2, 3) and storage.load(path, key="a/n") == 3
        with pytest.raises(KeyError):
            storage.load(path, key="a/x")
        with pytest.raises(FileNotFoundError):
            storage.load(tmp_path / "no")
        for wrong, error in (({"a": {1, 2}}, TypeError), ({"a": object()}, TypeError), ([1], ValueError)):
            with pytest.raises(error):
                storage.save(wrong, tmp_path / "b")
        assert os.listdir(tmp_path) == ["a"]
