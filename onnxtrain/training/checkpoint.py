"""Checkpoints of an ORTTrainer as files of torch.save(), with flat names."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch

from onnxtrain.training import _state
from onnxtrain.training.orttrainer import ORTTrainer

RUN = "onnxtrain_run"  # what the file has beside weights and the optimizer's state
_PREFIX = "ORT_checkpoint"


def experimental_state_dict(ort_trainer: ORTTrainer, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
    """Weights and buffers by name, and of the optimizer ``Moment_1_w``, ``Moment_2_w``, ``Update_Count_w`` or ``Step``.

    Returns:
        Copies, on the CPU. Empty, with a warning, before the first step.
    """
    if ort_trainer._engine is None:
        warnings.warn("ONNX Runtime training session is not initialized yet. Please run train_step or eval_step at "
                      "least once before calling state_dict().", stacklevel=2)
        return {}
    return _state.flat(ort_trainer._engine, ort_trainer._train_step_info.step, include_optimizer_state)


def experimental_load_state_dict(ort_trainer: ORTTrainer, state_dict: dict[str, Any], strict: bool = False) -> None:
    """Loads what experimental_state_dict() gives.

    Args:
        ort_trainer: before its first step it keeps the state until then.
        state_dict: names that are none of the trainer's are left out, unless strict.
        strict: refuse missing and unexpected names.

    Raises:
        RuntimeError: strict, and names differ. ValueError: a value has another shape.
    """
    _load(ort_trainer, state_dict, strict, {})


def _load(trainer: ORTTrainer, state: dict[str, Any], strict: bool, run: dict[str, Any]) -> None:
    if trainer._engine is None:
        trainer._load_state_dict = functools.partial(_apply, state, trainer, strict, run)
        return
    _apply(state, trainer, strict, run)


def _apply(state: dict[str, Any], trainer: ORTTrainer, strict: bool, run: dict[str, Any]) -> None:
    assert trainer._engine is not None
    _state.load_flat(trainer._engine, state, strict)
    for key in ("optimization_step", "step"):
        if key in run:
            setattr(trainer._train_step_info, key, run[key])
    _state.load_scaler_state(trainer.options.mixed_precision.loss_scaler, run.get("loss_scaler", {}))


def experimental_save_checkpoint(ort_trainer: ORTTrainer, checkpoint_dir: str, checkpoint_prefix: str = _PREFIX,
                                 checkpoint_state_dict: dict[str, Any] | None = None,
                                 include_optimizer_state: bool = True) -> None:
    """Writes ``{checkpoint_dir}/{checkpoint_prefix}.ort.pt``: the state under "model", how far the run is, and what the
    caller adds. An older file is replaced, with a warning, and only once the new one is complete.

    Args:
        ort_trainer: has run a step.
        checkpoint_dir: has to be there.
        checkpoint_prefix: first part of the file's name.
        checkpoint_state_dict: further entries, of what torch.load(weights_only=True) reads.
        include_optimizer_state: whether the optimizer's state is written.

    Raises:
        AssertionError: there is no such folder.
    """
    info = ort_trainer._train_step_info
    run = {"optimization_step": info.optimization_step, "step": info.step,
           "loss_scaler": _state.scaler_state(ort_trainer.options.mixed_precision.loss_scaler)}
    save_file(checkpoint_dir, checkpoint_prefix, {
        **(checkpoint_state_dict or {}), "model": experimental_state_dict(ort_trainer, include_optimizer_state),
        RUN: run})


def experimental_load_checkpoint(ort_trainer: ORTTrainer, checkpoint_dir: str, checkpoint_prefix: str = _PREFIX,
                                 strict: bool = False) -> dict[str, Any]:
    """Loads what experimental_save_checkpoint() wrote; training goes on as it would have without the break.

    Args:
        ort_trainer: of the same model and optimizer.
        checkpoint_dir, checkpoint_prefix: as it was saved.
        strict: see experimental_load_state_dict().

    Returns:
        The caller's entries.

    Raises:
        AssertionError: there is no such file.
    """
    found = load_file(checkpoint_dir, checkpoint_prefix)
    state, run = found.pop("model"), found.pop(RUN, {})
    _load(ort_trainer, state, strict, run)
    return found


def path_of(folder: str, prefix: str) -> str:
    """Of a checkpoint's file."""
    return os.path.join(folder, f"{prefix}.ort.pt")


def save_file(folder: str, prefix: str, content: dict[str, Any]) -> None:
    """Writes a checkpoint's file. Raises AssertionError where there is no such folder."""
    if not os.path.isdir(folder):
        raise AssertionError(f"checkpoint_dir directory doesn't exist: {folder}")
    path = path_of(folder, prefix)
    if os.path.exists(path):
        warnings.warn(f"{path} already exists, overwriting.", stacklevel=3)
    _state.save_tensors(content, path)


def load_file(folder: str, prefix: str) -> dict[str, Any]:
    """Reads it, as tensors and plain values. Raises AssertionError where there is no such file."""
    path = path_of(folder, prefix)
    if not os.path.exists(path):
        raise AssertionError(f"checkpoint file not found: {path}")
    return torch.load(path, map_location="cpu", weights_only=True)
