"""Checkpoints of an ORTTrainer as files of torch.save(), with flat names; checkpoints of several processes as one."""

from __future__ import annotations

import functools
import glob
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from onnxtrain import UnsupportedError
from onnxtrain.backend import _to_array
from onnxtrain.training import _checkpoint_storage, _state
from onnxtrain.training._update import MOMENTS, Array, TensorLike, as_tensor
from onnxtrain.training._validation import check
from onnxtrain.training.orttrainer import ORTTrainer

RUN = "onnxtrain_run"  # what the file has beside weights and the optimizer's state
PREFIX = "ORT_checkpoint"
# How far a run is, and under which names earlier versions had it in files of the older form.
_COUNTS = {"optimization_step": "global_step", "step": "current_step"}


def experimental_state_dict(ort_trainer: ORTTrainer, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
    """Weights and buffers by name, and of the optimizer ``Moment_1_w``, ``Moment_2_w``, ``Update_Count_w`` or ``Step``.

    Returns:
        Copies, on the CPU. Empty, with a warning, before the first step.
    """
    if ort_trainer._trained is None:
        warnings.warn("ONNX Runtime training session is not initialized yet. Please run train_step or eval_step at "
                      "least once before calling state_dict().", stacklevel=2)
        return {}
    return _state.flat(ort_trainer.state_dict(), include_optimizer_state)


def experimental_load_state_dict(ort_trainer: ORTTrainer, state_dict: Mapping[str, TensorLike],
                                 strict: bool = False) -> None:
    """Loads what experimental_state_dict() gives.

    Args:
        ort_trainer: before its first step it keeps the state until then.
        state_dict: names that are none of the trainer's are left out, unless strict.
        strict: refuse missing and unexpected names.

    Raises:
        RuntimeError: strict, and names differ. ValueError: a value has another shape.
    """
    _load(state_dict, ort_trainer, strict, {})


def _load(state: Mapping[str, TensorLike], trainer: ORTTrainer, strict: bool, run: Mapping[str, Any]) -> None:
    if trainer._trained is None:
        trainer._load_state_dict = functools.partial(_load, state, trainer, strict, run)
        return
    found = _state.of_file(state, trainer._trained, run)
    found["trainer_options"]["optimizer_name"] = trainer.optim_config.name
    trainer.load_state_dict(found, strict)


def experimental_save_checkpoint(ort_trainer: ORTTrainer, checkpoint_dir: str, checkpoint_prefix: str = PREFIX,
                                 checkpoint_state_dict: Mapping[str, object] | None = None,
                                 include_optimizer_state: bool = True) -> None:
    """Writes ``{checkpoint_dir}/{checkpoint_prefix}.ort.pt``: the state under "model", how far the run is, and what the
    caller adds. An older file is replaced, with a warning, and only once the new one is complete. With ZeRO every
    process writes its own file, ``{checkpoint_prefix}.ZeRO.{rank}.{world_size - 1}.ort.pt``.

    Args:
        ort_trainer: has run a step.
        checkpoint_dir: has to be there.
        checkpoint_prefix: first part of the file's name.
        checkpoint_state_dict: further entries, of what torch.load(weights_only=True) reads.
        include_optimizer_state: whether the optimizer's state is written.

    Raises:
        AssertionError: there is no such folder.
    """
    check(os.path.isdir(checkpoint_dir), f"checkpoint_dir directory doesn't exist: {checkpoint_dir}")
    info, processes = ort_trainer._train_step_info, _state.processes_of(ort_trainer._trained)
    content = {**(checkpoint_state_dict or {}),
               "model": experimental_state_dict(ort_trainer, include_optimizer_state),
               RUN: {**{name: getattr(info, name) for name in _COUNTS}, "processes": processes,
                     "loss_scaler": _state.scaler_state(ort_trainer.options.mixed_precision.loss_scaler)}}
    part = f".ZeRO.{processes['rank']}.{processes['size'] - 1}" if "pieces" in processes else ""
    path = _path(checkpoint_dir, checkpoint_prefix, part)
    if os.path.exists(path):
        warnings.warn(f"{path} already exists, overwriting.", stacklevel=2)
    _state.save_tensors(content, path)


def experimental_load_checkpoint(ort_trainer: ORTTrainer, checkpoint_dir: str, checkpoint_prefix: str = PREFIX,
                                 strict: bool = False) -> dict[str, Any]:
    """Loads what experimental_save_checkpoint() wrote; training goes on as it would have without the break. With ZeRO
    the files of all processes are joined, so that another number of processes, with ZeRO or without, may load them.

    Args:
        ort_trainer: of the same model and optimizer.
        checkpoint_dir, checkpoint_prefix: as it was saved.
        strict: see experimental_load_state_dict().

    Returns:
        The caller's entries.

    Raises:
        AssertionError: there is no such file, or only some of a checkpoint's, or ZeRO's files are of several.
    """
    found = _read(checkpoint_dir, checkpoint_prefix)
    state, run = found.pop("model"), found.pop(RUN, {})
    run |= {name: run[older] for name, older in _COUNTS.items() if older in run}
    _load(state, ort_trainer, strict, run)
    return found


def _path(folder: str, prefix: str, part: str = "") -> str:
    return os.path.join(folder, f"{prefix}{part}.ort.pt")


def _read(folder: str, prefix: str) -> dict[str, Any]:
    """A file, as tensors and plain values; the files of ZeRO as one.

    Raises:
        AssertionError: there is no such file, or one of ZeRO's is missing, or there are those of two world sizes, or
            files with ZeRO and without, or they are not of one checkpoint.
    """
    path = _path(folder, prefix)
    parts = glob.glob(_path(glob.escape(folder), glob.escape(prefix), ".ZeRO.*"))
    found = sorted(([path] if os.path.exists(path) else []) + parts)
    if not found:
        raise AssertionError(f"checkpoint file not found: {path}")
    if found == [path]:
        return torch.load(path, map_location="cpu", weights_only=True)
    wanted = [_path(folder, prefix, f".ZeRO.{rank}.{len(found) - 1}") for rank in range(len(found))]
    if found != sorted(wanted):
        raise AssertionError(f"the files {[os.path.basename(name) for name in found]} are not one checkpoint of "
                             "ZeRO, which has one file per process: give each checkpoint its own checkpoint_prefix")
    return _joined([torch.load(name, map_location="cpu", weights_only=True) for name in wanted])


def _joined(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One content from those of the files of all processes of ZeRO, in the order of their ranks. Their gradients stay
    each process's own, in a list.
    """
    found: dict[str, Any] = {"model": {}, "optimizer": {}}
    cut: dict[str, list[int]] = {}
    gradients: list[dict[str, object]] = []
    for content in contents:
        state = {name: _to_array(value) for name, value in content["model"].items()}
        pieces = content[RUN]["processes"]["pieces"]
        part = _state.nested(state, pieces)
        part["partition_info"] = {name: {"original_dim": state[name].shape} for name in pieces}
        _aggregate_model_states(part, cut, found, False)
        _aggregate_optimizer_states(part, cut, found)
        gradients.append({f"{_state.GRADIENT}_{name}": value
                          for name, value in part.get("accumulated_gradients", {}).items()})
    _make_whole(found, cut, False)
    run = {**contents[0][RUN], "gradients": gradients if any(gradients) else []}
    return {**contents[0], "model": _state.flat(found), RUN: run}


def aggregate_checkpoints(paths: Sequence[str], pytorch_format: bool = True) -> dict[str, Any]:
    """One state from the files that all processes of a run with ZeRO have written by ORTTrainer.save_checkpoint().

    Args:
        paths: of all of them, in any order.
        pytorch_format: only weights and buffers, as tensors by name.

    Returns:
        As ORTTrainer.state_dict() of one process gives it, with the user_dict of the first where there is one.

    Raises:
        AssertionError: they are not the files of one checkpoint of ZeRO, or have been saved within the steps of one
            update.
        UnsupportedError: of parallel layers. ImportError: h5py is not installed.
    """
    paths = _by_rank(paths)
    first = _checkpoint_storage.load(paths[0], key="trainer_options")
    mixed = bool(first["mixed_precision"])
    rest: dict[str, object] = {}
    found: dict[str, Any] = {"model": {}, "optimizer": {}}
    cut: dict[str, list[int]] = {}
    for path in paths:  # one after the other: each has all weights
        state = _checkpoint_storage.load(path)
        check("partition_info" in state,
              "the checkpoints have no partition_info: only checkpoints of ZeRO can be aggregated")
        check("accumulated_gradients" not in state,
              "the checkpoints were saved within the steps of one update: save them after an update")
        rest = rest or {key: value for key, value in state.items() if key not in (*found, "partition_info")}
        _aggregate_model_states(state, cut, found, mixed)
        _aggregate_optimizer_states(state, cut, found)
    _make_whole(found, cut, mixed)
    if pytorch_format:
        return _to_pytorch_format(found)
    return {**rest, **found, "trainer_options": {
        **first, "mixed_precision": mixed, "zero_stage": 0, "world_rank": 0, "world_size": 1,
        "data_parallel_size": 1, "horizontal_parallel_size": 1}}


def _by_rank(paths: Sequence[str]) -> list[str]:
    """The files of all processes of one run, in the order of their ranks.

    Raises:
        AssertionError, UnsupportedError: see aggregate_checkpoints().
    """
    same = ("mixed_precision", "world_size", "zero_stage", "optimizer_name")
    options = [_checkpoint_storage.load(path, key="trainer_options") for path in paths]
    check(all({*same, "world_rank"} <= set(other) for other in options),
          f"trainer_options must have {', '.join(same)} and world_rank")
    for key in same:
        check(all(other[key] == options[0][key] for other in options), f"{key} differs between the checkpoints")
    if any(int(other.get("horizontal_parallel_size", 1)) > 1 for other in options):  # older files lack it
        raise UnsupportedError("checkpoints of parallel layers (horizontal_parallel_size above 1) are not supported")
    check(int(options[0]["zero_stage"]) > 0, "the checkpoints are not of ZeRO: each one is complete, so there is "
          "nothing to aggregate")
    ranks, count = [int(other["world_rank"]) for other in options], int(options[0]["world_size"])
    check(sorted(ranks) == list(range(count)), f"the checkpoints are of processes {sorted(ranks)}, but {count} "
          "processes wrote one each")
    return [path for _, path in sorted(zip(ranks, paths))]


def _aggregate_model_states(rank_state_dict: Mapping[str, Any], original_dims: dict[str, list[int]],
                            state_dict: dict[str, Any], mixed_precision: bool) -> None:
    """Adds one process's weights to those of the processes before it.

    Args:
        rank_state_dict: its ORTTrainer.state_dict(). Without "model" nothing is added.
        original_dims: gets the shapes of the weights that its ``partition_info`` names.
        state_dict: what has been joined so far. A weight that is cut, as onnxruntime-training cuts its float32 weights
            with mixed precision, is put together one-dimensional.
        mixed_precision: whether weights may be cut; else they are whole in every process.

    Raises:
        AssertionError: two processes have different values of one weight.
    """
    own = _dims(rank_state_dict, original_dims)
    if "model" not in rank_state_dict:
        return
    joined = state_dict.setdefault("model", {}).setdefault("full_precision", {})
    for name, value in rank_state_dict["model"].get("full_precision", {}).items():
        _join(joined, name, value, own.get(name) if mixed_precision else None, f"model state {name}")


def _aggregate_optimizer_states(rank_state_dict: Mapping[str, Any], original_dims: dict[str, list[int]],
                                state_dict: dict[str, Any]) -> None:
    """The same of the optimizer's state, whose moments are cut with mixed precision and without."""
    own = _dims(rank_state_dict, original_dims)
    if "optimizer" not in rank_state_dict:
        return
    joined = state_dict.setdefault("optimizer", {})
    for name, entry in rank_state_dict["optimizer"].items():
        for key, value in entry.items():
            _join(joined.setdefault(name, {}), key, value, own.get(name) if key in MOMENTS else None,
                  f"optimizer state {name}")


def _make_whole(found: Mapping[str, Any], cut: Mapping[str, Sequence[int]], mixed_precision: bool) -> None:
    """Gives what has been put together its shapes. Raises AssertionError where a piece is missing."""
    weights = found["model"].get("full_precision", {})
    for name, shape in cut.items():
        pieces = [(found["optimizer"].get(name, {}), moment) for moment in MOMENTS]
        for values, key in pieces + [(weights, name)] * mixed_precision:
            if key in values:
                check(values[key].size == math.prod(shape), f"the checkpoints hold only parts of {name}: "
                      "give the files of all processes")
                values[key] = values[key].reshape(shape)


def _dims(state: Mapping[str, Any], original_dims: dict[str, list[int]]) -> dict[str, list[int]]:
    own = {name: [int(size) for size in info["original_dim"]]
           for name, info in state.get("partition_info", {}).items()}
    original_dims.update(own)
    return own


def _join(joined: dict[str, Array], key: str, value: Array, shape: list[int] | None, what: str) -> None:
    """Appends a piece of a tensor of this shape; anything else has to be what is there already."""
    if key not in joined:
        joined[key] = value
    elif shape is not None and list(value.shape) != shape:
        joined[key] = np.concatenate([joined[key].reshape(-1), value.reshape(-1)])
    else:
        check(np.array_equal(joined[key], value, equal_nan=True), f"TensorLike mismatch for {what}")


def _to_pytorch_format(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights and buffers of a state as tensors by name."""
    return {name: as_tensor(value) for name, value in state_dict.get("model", {}).get("full_precision", {}).items()}
