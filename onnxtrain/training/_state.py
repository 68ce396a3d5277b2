"""The state of a training run as dicts: nested ones, as ORTTrainer.state_dict() has them, and flat ones, under the
names of onnxruntime-training's sessions.

Used by orttrainer.py, which makes and loads nested ones, and checkpoint.py, which makes flat ones of them and back.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor

from onnxtrain._export import files
from onnxtrain.backend import _to_array
from onnxtrain.training._trainer_step import TrainedModel
from onnxtrain.training._update import COUNT, MOMENTS, SHARED, Array, as_tensor

_Value = TypeVar("_Value")
GRADIENT = "Gradient"  # what one accumulated gradient is called; there are none after an update


class TrainingSession:
    """What scripts read of a trainer's inside: its state as arrays, copied."""

    def __init__(self, trained: TrainedModel) -> None:
        self._trained = trained

    def get_state(self) -> dict[str, Array]:
        """Trained weights, and what the optimizer keeps of them, under the names of flat(); with mixed precision
        ``w_fp16`` too: see get_model_state().
        """
        model = self.get_model_state(include_mixed_precision_weights=True)
        half = {f"{name}_fp16": value for name, value in model.get("mixed_precision", {}).items()}
        optimizer = {name: _to_array(value) for name, value in flat_optimizer(self._trained.update.state()).items()}
        return {**model["full_precision"], **half, **optimizer}

    def get_model_state(self, include_mixed_precision_weights: bool = False) -> dict[str, dict[str, Array]]:
        """``{"full_precision": {weight: array}}`` of the trained weights. With mixed precision, and asked for,
        "mixed_precision" as well: the same in float16, which autocast makes again in each step.
        """
        weights = copied(self._trained.weights())
        found = {"full_precision": {name: _to_array(value) for name, value in weights.items()}}
        if include_mixed_precision_weights and self._trained.mixed_precision:
            found["mixed_precision"] = {name: _to_array(value.half()) for name, value in weights.items()}
        return found

    def get_optimizer_state(self) -> dict[str, dict[str, Array]]:
        """Per weight, and "shared_optimizer_state": see Update.state()."""
        return {name: {key: _to_array(value) for key, value in entry.items()}
                for name, entry in self._trained.update.state().items()}

    def get_partition_info_map(self) -> dict[str, dict[str, list[int]]]:
        """With ZeRO, of each weight that this process updates, or a part of it: its shape, ``original_dim``, and
        ``megatron_row_partition``, always [-1]. Else empty.
        """
        weights, shards = self._trained.weights(), self._trained.shards
        return {} if shards is None else {
            name: {"original_dim": list(weights[name].shape), "megatron_row_partition": [-1]} for name in shards.own}


def copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def flat_optimizer(state: Mapping[str, Mapping[str, _Value]]) -> dict[str, _Value]:
    """Update.state() as ``Moment_1_w``, ``Moment_2_w``, ``Update_Count_w`` and ``Step``."""
    found = {f"{key}_{name}": value for name, entry in state.items() if name != SHARED for key, value in entry.items()}
    return {**found, **state.get(SHARED, {})}


def nested_optimizer(state: Mapping[str, _Value], weights: Iterable[str]) -> dict[str, dict[str, _Value]]:
    """The opposite; what is none of an optimizer's is left out."""
    found: dict[str, dict[str, _Value]] = {}
    for name in weights:
        for key in (*MOMENTS, COUNT):
            if f"{key}_{name}" in state:
                found.setdefault(name, {})[key] = state[f"{key}_{name}"]
    if "Step" in state and "Step" not in weights:
        found[SHARED] = {"Step": state["Step"]}
    return found


def flat(state: Mapping[str, Any], optimizer: bool = True) -> dict[str, Tensor]:
    """A nested state as weights and buffers under their own names, and if the optimizer's state is asked for, that of
    flat_optimizer() and, within the steps of one update, ``Gradient_w``, the sum so far.
    """
    found = dict(state["model"]["full_precision"])
    if optimizer:  # with ZeRO the moments of this process's pieces
        found |= flat_optimizer(state["optimizer"])
        found |= {f"{GRADIENT}_{name}": value for name, value in state.get("accumulated_gradients", {}).items()}
    return {name: as_tensor(value) for name, value in found.items()}


def nested(state: Mapping[str, object], weights: Iterable[str]) -> dict[str, Any]:
    """The opposite, of these trained weights."""
    optimizer = nested_optimizer(state, weights)
    sums = {name: state[f"{GRADIENT}_{name}"] for name in state if f"{GRADIENT}_{name}" in state}
    others = {*flat_optimizer(optimizer), *(f"{GRADIENT}_{name}" for name in sums)}
    found = {"model": {"full_precision": {name: value for name, value in state.items() if name not in others}},
             "optimizer": optimizer}
    return {**found, "accumulated_gradients": sums} if sums else found


def of_file(state: Mapping[str, object], trained: TrainedModel, run: Mapping[str, Any]) -> dict[str, Any]:
    """A flat state as a nested one that this trainer loads.

    Args:
        run: what a file has beside: how far the run was, and whose gradients wait for an update.

    Raises:
        RuntimeError: see check_gradients().
    """
    processes, gradients = run.get("processes", {}), run.get("gradients", [])
    rank, size = processes.get("rank", 0), processes.get("size", 1)
    if gradients:  # of all processes of ZeRO
        rank, size = processes_of(trained)["rank"], len(gradients)
        check_gradients(trained, rank, size)
        state = {**state, **gradients[rank]}
    return {**nested(state, trained.weights()), "trainer_options": {"world_rank": rank, "world_size": size},
            "train_step_info": run, "loss_scaler": run.get("loss_scaler", {})}


def without_lacking_buffers(trained: TrainedModel, names: Iterable[str], state: Collection[str]) -> list[str]:
    """These names but for buffers that the state does not have. onnxruntime-training's checkpoints lack those that the
    exported graph did not read, such as the number of batches of a BatchNorm; here they stay, with a warning.
    """
    lacking = [name for name in trained.model.buffers() if name not in state]
    if lacking:
        warnings.warn(f"the state has no value for the buffers {lacking}: they stay as they are", stacklevel=3)
    return [name for name in names if name not in lacking]


def processes_of(trained: TrainedModel | None) -> dict[str, Any]:
    """Whose state it is: ``rank``, ``size`` and with ZeRO ``pieces``, (start, stop) of flattened weights by name."""
    peers, shards = (None, None) if trained is None else (trained.peers, trained.shards)
    found: dict[str, Any] = {"rank": peers.rank if peers else 0, "size": peers.size if peers else 1}
    if shards is not None:
        found["pieces"] = {name: [piece.start, piece.stop] for name, piece in shards.own.items()}
    return found


def check_gradients(trained: TrainedModel, rank: int, size: int) -> None:
    """Before gradients are loaded that waited for an update.

    Raises:
        RuntimeError: they are another process's.
    """
    own = processes_of(trained)
    if (rank, size) != (own["rank"], own["size"]):
        raise RuntimeError(f"the checkpoint was saved within the steps of one update, by process {rank} of {size}, but "
                           f"this is process {own['rank']} of {own['size']}, which has other gradients: save after an "
                           "update, or let every process save and load its own checkpoint")


def scaler_state(scaler: object) -> dict[str, float]:
    """The state of a loss scaler of either class; empty for None and for the user's own scaler."""
    scaler = getattr(scaler, "asked", scaler)  # of the older form's trainer
    names = [name for name in ("_loss_scale", "_stable_steps_count", "loss_scale_", "stable_steps_")
             if name in vars(scaler)] if scaler is not None else []
    return {name: getattr(scaler, name) for name in names}


def load_scaler_state(scaler: object, state: Mapping[str, float]) -> None:
    """The opposite."""
    scaler = getattr(scaler, "asked", scaler)
    for name, value in state.items():
        if scaler is not None and name in vars(scaler):
            setattr(scaler, name, type(getattr(scaler, name))(value))


def written_whole(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
    """Lets write() fill a file that becomes this path once it is complete: at every moment the path has the old file
    or the new one. What processes left that were killed an hour ago and more is removed.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder of {target} does not exist")
    mask = os.umask(0)
    os.umask(mask)
    with files.replacing(target) as file:
        write(file)
        file.flush()
        os.fchmod(file.fileno(), 0o666 & ~mask)
        os.fsync(file.fileno())
    with contextlib.suppress(OSError):
        files.clear(target.parent)


def save_tensors(value: dict[str, object], path: str) -> None:
    """torch.save(), whole or not at all."""
    written_whole(path, lambda file: torch.save(value, file))
