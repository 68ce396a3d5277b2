"""Nested dicts of arrays and numbers in a file of HDF5: groups are dicts. Needs h5py, which is imported when used."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from types import ModuleType
from typing import IO, Any

import numpy as np
import torch

from onnxtrain.training._state import written_whole

_SCALARS = (bool, int, float, str, bytes, np.generic)


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("ORTTrainer writes checkpoints as HDF5 files, for which h5py must be installed; "
                          "onnxtrain.training.checkpoint.experimental_save_checkpoint() needs only torch") from error
    return h5py


def save(save_obj: Mapping[str, object], path: str | os.PathLike[str]) -> None:
    """Writes a dict.

    Args:
        save_obj: keys are str; values are such dicts, tensors, NumPy arrays, numbers, lists of numbers, bool, str
            or bytes.
        path: must not be there yet. The file appears whole or not at all.

    Raises:
        ValueError: save_obj is no dict. TypeError: a value is of another type. FileExistsError: path is there.
    """
    if not isinstance(save_obj, Mapping):
        raise ValueError("only a dict can be saved")
    h5py = _h5py()
    if os.path.exists(path):
        raise FileExistsError(f"{os.fspath(path)} already exists")

    def write(target: IO[bytes]) -> None:
        with h5py.File(target, "w") as file:
            _write(file, save_obj, "")

    written_whole(path, write)


def _write(group: Any, values: Mapping[str, object], where: str) -> None:
    for key, value in values.items():
        place = f"{where}/{key}"
        if isinstance(value, Mapping):
            _write(group.create_group(key), value, place)
        elif isinstance(value, torch.Tensor):
            group.create_dataset(key, data=value.detach().cpu().numpy())
        elif isinstance(value, (np.ndarray, *_SCALARS)):
            group.create_dataset(key, data=value)
        elif isinstance(value, (list, tuple)) and np.asarray(value).dtype.kind in "biuf":
            group.create_dataset(key, data=np.asarray(value))
        else:
            raise TypeError(f"{place}: a {type(value).__name__} cannot be saved")


def load(path: str | os.PathLike[str], key: str | None = None) -> Any:
    """Reads a dict, or what is in it under a key, "a/b" of what is nested. Numbers come back as NumPy's, str as bytes.

    Raises:
        FileNotFoundError: no such file. KeyError: no such key.
    """
    h5py = _h5py()
    if not os.path.exists(path):
        raise FileNotFoundError(f"{os.fspath(path)} does not exist")
    with h5py.File(path, "r") as file:
        return _read(h5py, file if key is None else file[key.rstrip("/")])


def _read(h5py: ModuleType, item: Any) -> Any:
    return {key: _read(h5py, below) for key, below in item.items()} if isinstance(item, h5py.Group) else item[()]


def to_serialized_hex(user_dict: Mapping[str, object]) -> str:
    """A dict, pickled, as hexadecimal digits."""
    return pickle.dumps(user_dict).hex()


def from_serialized_hex(text: str | bytes) -> dict[str, Any]:
    """The opposite. It runs what the pickle says: give it what you trust."""
    return pickle.loads(bytes.fromhex(text.decode() if isinstance(text, bytes) else text))
