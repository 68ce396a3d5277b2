"""What an ORTTrainer optimizes with: SGDConfig, AdamConfig, LambConfig. Plain data; _update.py acts on it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from onnxtrain.training._validation import check, is_number

_NAMES = ("AdamOptimizer", "LambOptimizer", "SGDOptimizer")


class _OptimizerConfig:
    """An optimizer by name, with its hyperparameters.

    Args:
        name: "AdamOptimizer", "LambOptimizer" or "SGDOptimizer".
        params: groups; each a dict of ``params``, a list of weights' names, and of the hyperparameters that are others
            for these weights. Weights of no group have the defaults.
        defaults: every hyperparameter, ``lr`` among them.

    Attributes:
        name, lr, defaults: as given; ``x_coef`` in the defaults is called ``x``.
        params: the groups, complete with defaults; the caller's dicts stay as they are.

    Raises:
        AssertionError: a value is of another type or outside its range; the message says which.
    """

    def __init__(self, name: str, params: Sequence[Mapping[str, object]], defaults: dict[str, float]) -> None:
        check(isinstance(name, str) and name in _NAMES, f"'name' must be one of {', '.join(map(repr, _NAMES))}")
        check(isinstance(defaults, dict), "'defaults' must be a dict")
        check("lr" in defaults, "'defaults' must contain a 'lr'")
        check(is_number(defaults["lr"], 0), "lr must be a positive number")
        check(isinstance(params, list), "'params' must be a list")
        self.name = name
        self.lr = float(defaults["lr"])
        self.defaults = {key.removesuffix("_coef"): value for key, value in defaults.items()}
        self._check(self.defaults)
        self.params = [self._group(group) for group in params]

    def _group(self, given: Mapping[str, Any]) -> dict[str, Any]:
        check(isinstance(given, dict) and len(given) > 1 and "params" in given,
              "each group of 'params' must be a dict with 'params' and at least one hyperparameter")
        names = given["params"]
        check(isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names),
              "'params' of a group must be a list of weights' names")
        own = {key.removesuffix("_coef"): value for key, value in given.items()}
        for key in own:
            check(key != "lr", "'lr' is not supported inside params")
            check(key == "params" or key in self.defaults,
                  f"'{key}' of a group is not a hyperparameter of {self.name}")
        self._check(whole := {**self.defaults, **own})
        return whole

    def _check(self, values: Mapping[str, Any]) -> None:
        """Raises AssertionError where hyperparameters, the defaults or those of a group, are out of range."""

    def of(self, weight: str) -> dict[str, float]:
        """The hyperparameters of one weight, ``lr`` left out."""
        group = next((group for group in self.params if weight in group["params"]), self.defaults)
        return {key: value for key, value in group.items() if key not in ("params", "lr")}


class SGDConfig(_OptimizerConfig):
    """Stochastic gradient descent: ``p -= lr g``, without momentum, decay and clipping.

    Args:
        params: has to be empty.
        lr: learning rate, a number of at least 0.

    Raises:
        AssertionError: as _OptimizerConfig.
    """

    def __init__(self, params: Sequence[Mapping[str, object]] = [], lr: float = 0.001) -> None:  # noqa: B006
        check(params == [], "'params' must be an empty list for SGD optimizer")
        super().__init__("SGDOptimizer", params, {"lr": lr})


class _Moments(_OptimizerConfig):
    """What Adam and LAMB share. The defaults are attributes, under the names of the arguments."""

    def __init__(self, name: str, params: Sequence[Mapping[str, object]], defaults: dict[str, float]) -> None:
        super().__init__(name, params, defaults)
        for key, value in self.defaults.items():
            setattr(self, "lambda_coef" if key == "lambda" else key, value)

    def _check(self, values: Mapping[str, Any]) -> None:
        for name in ("alpha", "beta", "lambda", "epsilon"):
            check(is_number(values[name], 0),
                  f"'{'lambda_coef' if name == 'lambda' else name}' must be a positive number")
        check(is_number(values["max_norm_clip"]) and values["max_norm_clip"] > 0,
              "'max_norm_clip' must be a positive number")
        check(isinstance(values["do_bias_correction"], bool), "'do_bias_correction' must be a boolean")


class AdamConfig(_Moments):
    """Adam with decoupled weight decay.

    With ``m = alpha m + (1 - alpha) g``, ``v = beta v + (1 - beta) g^2``, ``c1 = 1 - alpha^t``, ``c2 = 1 - beta^t``
    (1 without bias correction):

    - BEFORE_WEIGHT_UPDATE: ``p -= lr (m / c1 / (sqrt(v / c2) + epsilon) + lambda p)``
    - AFTER_WEIGHT_UPDATE: ``p -= lr sqrt(c2) / c1 m / (sqrt(v) + epsilon)``, then ``p -= lr lambda p``

    Args:
        params: groups, see _OptimizerConfig.
        lr: learning rate.
        alpha, beta: decay of the first and second moment.
        lambda_coef: weight decay.
        epsilon: added to the denominator.
        max_norm_clip: gradients are multiplied by max_norm_clip / n where the norm n of all of them together is larger;
            ORTTrainerOptions' ``utils.grad_norm_clip`` turns that off.
        do_bias_correction: see above.
        weight_decay_mode: a DecayMode.

    Attributes:
        alpha, beta and so on: as given.

    Raises:
        AssertionError: as _OptimizerConfig.
    """

    class DecayMode(enum.IntEnum):
        """Where weight decay enters."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(self, params: Sequence[Mapping[str, object]] = [], lr: float = 0.001, alpha: float = 0.9,  # noqa: B006
                 beta: float = 0.999, lambda_coef: float = 0.0, epsilon: float = 1e-8, max_norm_clip: float = 1.0,
                 do_bias_correction: bool = True,
                 weight_decay_mode: AdamConfig.DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE) -> None:
        super().__init__("AdamOptimizer", params, {
            "lr": lr, "alpha": alpha, "beta": beta, "lambda": lambda_coef, "epsilon": epsilon,
            "max_norm_clip": max_norm_clip, "do_bias_correction": do_bias_correction,
            "weight_decay_mode": weight_decay_mode})

    def _check(self, values: Mapping[str, Any]) -> None:
        super()._check(values)
        check(isinstance(values["weight_decay_mode"], AdamConfig.DecayMode),
              "'weight_decay_mode' must be a AdamConfig.DecayMode")


class LambConfig(_Moments):
    """LAMB: ``u = m / c1 / (sqrt(v / c2) + epsilon) + lambda p``; ``p -= lr r u``, where r is ``|p| / |u|`` of each
    weight by itself, within the limits, and 1 where a norm is 0. Moments and c1, c2 are AdamConfig's.

    Args:
        params: groups, see _OptimizerConfig; the ratios' limits and do_bias_correction are the same for all weights.
        lr: learning rate.
        alpha, beta, lambda_coef, epsilon, max_norm_clip, do_bias_correction: as in AdamConfig.
        ratio_min, ratio_max: limits of r, floats.

    Raises:
        AssertionError: as _OptimizerConfig.
    """

    def __init__(self, params: Sequence[Mapping[str, object]] = [], lr: float = 0.001, alpha: float = 0.9,  # noqa: B006
                 beta: float = 0.999, lambda_coef: float = 0.0, ratio_min: float = float("-inf"),
                 ratio_max: float = float("inf"), epsilon: float = 1e-6, max_norm_clip: float = 1.0,
                 do_bias_correction: bool = False) -> None:
        super().__init__("LambOptimizer", params, {
            "lr": lr, "alpha": alpha, "beta": beta, "lambda": lambda_coef, "ratio_min": ratio_min,
            "ratio_max": ratio_max, "epsilon": epsilon, "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction})

    def _check(self, values: Mapping[str, Any]) -> None:
        super()._check(values)
        for name in ("ratio_min", "ratio_max"):
            check(isinstance(values[name], float), f"'{name}' must be a float")
        check(values["ratio_min"] <= values["ratio_max"], "'ratio_min' must be at most 'ratio_max'")
        for name in ("ratio_min", "ratio_max", "do_bias_correction"):
            check(values[name] == self.defaults[name], f"'{name}' must be the same for all weights of LAMB")
