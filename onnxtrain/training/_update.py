"""The update that an optimizer's configuration asks for, by the fused optimizers of onnxtrain.optim, and its state
under the names of onnxruntime-training.

Used by _trainer_step.py. It knows weights and their names, and nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from onnxtrain import _C
from onnxtrain.optim import SGD, AdamWMode, FusedAdam, Lamb
from onnxtrain.optim._base import FusedOptimizer, UpdateCall
from onnxtrain.optim._clip import Lists, there

MOMENTS = {"Moment_1": "exp_avg", "Moment_2": "exp_avg_sq"}
COUNT = "Update_Count"
SHARED = "shared_optimizer_state"
Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
TensorLike: TypeAlias = "Tensor | np.typing.ArrayLike"


def _sgd(groups: list[dict[str, Any]], lr: float) -> FusedOptimizer:
    return SGD([{"params": group["params"]} for group in groups], lr=lr)


def _adam(groups: list[dict[str, Any]], lr: float) -> FusedOptimizer:
    return FusedAdam([{"params": group["params"], "betas": (group["alpha"], group["beta"]), "eps": group["epsilon"],
                       "weight_decay": group["lambda"], "bias_correction": bool(group["do_bias_correction"]),
                       "adam_w_mode": int(AdamWMode.ADAMW_TRANSFORMERS if group["weight_decay_mode"]
                                          else AdamWMode.ADAMW_TORCH)} for group in groups], lr=lr)


def _lamb(groups: list[dict[str, Any]], lr: float) -> FusedOptimizer:
    """A ratio of norms is never below 0, and neither need its limit be."""
    return Lamb([{"params": group["params"], "betas": (group["alpha"], group["beta"]), "eps": group["epsilon"],
                  "weight_decay": group["lambda"], "bias_correction": bool(group["do_bias_correction"]),
                  "ratio_min": max(0.0, group["ratio_min"]), "ratio_max": group["ratio_max"]} for group in groups],
                lr=lr)


_MAKERS: dict[str, Callable[[list[dict[str, Any]], float], FusedOptimizer]] = {
    "SGDOptimizer": _sgd, "AdamOptimizer": _adam, "LambOptimizer": _lamb}


class Update:
    """Clips and applies the gradients of some weights.

    Args:
        name: "SGDOptimizer", "AdamOptimizer" or "LambOptimizer".
        weights: the trained ones, by name.
        hyperparameters: of a weight's name gives its hyperparameters, as _OptimizerConfig.of() does.
        clip: whether Adam and LAMB clip to max_norm_clip.
        norm_of_all: of the norm of these gradients makes the one that counts, where other processes have others.
    """

    def __init__(self, name: str, weights: Mapping[str, torch.nn.Parameter],
                 hyperparameters: Callable[[str], dict[str, float]], clip: bool,
                 norm_of_all: Callable[[float | Tensor], float | Tensor] | None = None) -> None:
        self.name = name
        self._norm_of_all = norm_of_all
        self.weights = dict(weights)
        self._clips = clip and name != "SGDOptimizer"
        self._lists = Lists()
        by_limit: dict[float, dict[tuple[tuple[str, float], ...], dict[str, Any]]] = {}
        for weight, parameter in self.weights.items():
            values = hyperparameters(weight)
            limit = float(values.pop("max_norm_clip", math.inf)) if self._clips else math.inf
            groups = by_limit.setdefault(limit, {})
            groups.setdefault(tuple(sorted(values.items())), {**values, "params": []})["params"].append(parameter)
        # One optimizer for each limit: the factor that gradients are multiplied by is an optimizer's.
        self._optimizers = [(limit, _MAKERS[name](list(groups.values()), 0.0)) for limit, groups in by_limit.items()]
        for _, optimizer in self._optimizers:
            optimizer._norm_epsilon = 0.0
        # Whether step() is one call of the core, and can be a part of a larger one.
        self.is_one_call = (len(self._optimizers) == 1 and norm_of_all is None
                          and all(weight.device.type == "cpu" for weight in weights.values()))
        self._of = {id(parameter): optimizer for _, optimizer in self._optimizers
                    for group in optimizer.param_groups for parameter in group["params"]}

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for _, optimizer in self._optimizers:
            optimizer.zero_grad(True)

    def step(self, lr: float, scale: float, check: bool,
             within: Callable[[UpdateCall], float | None] | None = None) -> bool:
        """One update of every weight that has a gradient.

        Args:
            lr: the rate.
            scale: the gradients are multiplied by it; then they are clipped.
            check: whether gradients that are not finite leave everything as it is.
            within: see FusedOptimizer._run(); only where is_one_call holds.

        Returns:
            Whether the update has been done.
        """
        if self.is_one_call:
            return self._step_alone(lr, scale, check, within)
        norm: float | Tensor = 0.0
        if check or self._clips:
            norm = self._norm() * scale
            if check and not math.isfinite(norm := float(norm)):
                return False
        for limit, optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.next_unscale = scale * _factor(norm, limit)
            optimizer.step()
        return True

    def _step_alone(self, lr: float, scale: float, check: bool,
                    within: Callable[[UpdateCall], float | None] | None) -> bool:
        (limit, optimizer), = self._optimizers
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer._only_finite = check
        norm = optimizer._run(limit if check or limit < math.inf else -1.0, scale, within=within)
        return not check or norm is None or math.isfinite(norm)

    def _norm(self) -> float | Tensor:
        """Of all gradients together; on CUDA a 0-dim tensor, for which nothing waits."""
        gradients = [p.grad for p in self.weights.values() if p.grad is not None]
        place = there(gradients)
        norm = self._lists.norm(place, gradients) if place else math.sqrt(sum(_C.sums_of_squares(gradients)))
        return norm if self._norm_of_all is None else self._norm_of_all(norm)

    # ---- state ----

    def _entry(self, parameter: torch.nn.Parameter) -> Mapping[str, Tensor]:
        return self._of[id(parameter)].state.get(parameter, {})

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Of each weight Moment_1, Moment_2 (as the weight) and for Adam Update_Count; for LAMB ``Step`` in
        "shared_optimizer_state". Both counts are int64 of shape (1,): the number of the next update, from 1. Nothing
        for SGD. Copies, on the CPU.
        """
        if self.name == "SGDOptimizer":
            return {}
        found: dict[str, dict[str, Tensor]] = {}
        latest = 0
        for name, parameter in self.weights.items():
            entry = self._entry(parameter)
            found[name] = {moment: entry[own].detach().cpu().clone() if own in entry else
                           torch.zeros_like(parameter, device="cpu", requires_grad=False)
                           for moment, own in MOMENTS.items()}
            steps = int(entry["step"]) if "step" in entry else 0
            latest = max(latest, steps)
            if self.name == "AdamOptimizer":
                found[name][COUNT] = torch.tensor([steps + 1])
        if self.name == "LambOptimizer" and self.weights:
            found[SHARED] = {"Step": torch.tensor([latest + 1])}
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[str, TensorLike]]) -> None:
        """Takes state as state() gives it, of tensors or arrays; weights that it does not name keep theirs.

        Raises:
            ValueError: a moment has another shape than its weight. Nothing has been loaded then.
        """
        shared = next(iter(state.get(SHARED, {}).values()), None)
        made: list[tuple[torch.nn.Parameter, dict[str, Tensor]]] = []
        for name, parameter in self.weights.items():
            given = state.get(name)
            if self.name == "SGDOptimizer" or given is None and shared is None:
                continue
            entry = dict(self._entry(parameter))
            for moment, own in MOMENTS.items():
                if given is not None and moment in given:
                    value = as_tensor(given[moment])
                    if value.shape != parameter.shape:
                        raise ValueError(f"{moment} of {name} has the shape {tuple(value.shape)}, expected "
                                         f"{tuple(parameter.shape)}")
                    entry[own] = torch.empty_like(parameter, requires_grad=False).copy_(value)
                elif own not in entry:
                    entry[own] = torch.zeros_like(parameter, requires_grad=False)
            count = shared if shared is not None else (given or {}).get(COUNT)
            if count is not None:
                steps = int(as_tensor(count).reshape(-1)[0]) - 1
                entry["step"] = torch.tensor(float(steps), dtype=torch.float32, device=parameter.device)
            made.append((parameter, entry))
        for parameter, entry in made:
            self._of[id(parameter)].state[parameter] = entry


def _factor(norm: float | Tensor, limit: float) -> float | Tensor:
    """What gradients of this norm are multiplied by."""
    if limit == math.inf:
        return 1.0
    if isinstance(norm, Tensor):
        return torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    return limit / norm if norm > limit else 1.0


def as_tensor(value: TensorLike) -> Tensor:
    """A tensor of a tensor, an array or a number; shares memory where it can."""
    if isinstance(value, Tensor):
        return value.detach()
    array = np.require(value, requirements=["C", "W"])
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
