"""What an ORTTrainer optimizes with: SGDConfig, AdamConfig, LambConfig. Plain data; _update.py acts on it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

_NAMES = ("AdamOptimizer", "LambOptimizer", "SGDOptimizer")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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

    def __init__(self, name: str, params: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> None:
        _check(isinstance(name, str) and name in _NAMES, f"'name' must be one of {', '.join(map(repr, _NAMES))}")
        _check(isinstance(defaults, dict), "'defaults' must be a dict")
        _check("lr" in defaults, "'defaults' must contain a 'lr'")
        _check(_is_number(defaults["lr"]) and defaults["lr"] >= 0, "lr must be a positive number")
        _check(isinstance(params, list), "'params' must be a list")
        self.name = name
        self.lr = float(defaults["lr"])
        self.defaults = {key.removesuffix("_coef"): value for key, value in defaults.items()}
        self.params = [self._group(group) for group in params]

    def _group(self, given: Any) -> dict[str, Any]:
        _check(isinstance(given, dict) and len(given) > 1 and "params" in given,
               "each group of 'params' must be a dict with 'params' and at least one hyperparameter")
        names = given["params"]
        _check(isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names),
               "'params' of a group must be a list of weights' names")
        own = {key.removesuffix("_coef"): value for key, value in given.items()}
        for key in own:
            _check(key != "lr", "'lr' is not supported inside params")
            _check(key == "params" or key in self.defaults,
                   f"'{key}' of a group is not a hyperparameter of {self.name}")
        return {**self.defaults, **own}

    def of(self, weight: str) -> dict[str, Any]:
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

    def __init__(self, params: Sequence[dict[str, Any]] = [], lr: float = 0.001) -> None:  # noqa: B006
        _check(params == [], "'params' must be an empty list for SGD optimizer")
        super().__init__("SGDOptimizer", params, {"lr": lr})


def _check_moments(alpha: float, beta: float, lambda_coef: float, epsilon: float, max_norm_clip: float,
                   do_bias_correction: bool) -> None:
    for name, value in (("alpha", alpha), ("beta", beta), ("lambda_coef", lambda_coef), ("epsilon", epsilon)):
        _check(_is_number(value) and value >= 0, f"'{name}' must be a positive number")
    _check(_is_number(max_norm_clip) and max_norm_clip > 0, "'max_norm_clip' must be a positive number")
    _check(isinstance(do_bias_correction, bool), "'do_bias_correction' must be a boolean")


def _finish(config: _OptimizerConfig, check: Any) -> None:
    """Checks every group's values as the defaults are, and makes the defaults attributes, under the arguments' names.
    """
    for group in config.params:
        check({key: value for key, value in group.items() if key not in ("params", "lr")})
    for name, value in config.defaults.items():
        setattr(config, "lambda_coef" if name == "lambda" else name, value)


class AdamConfig(_OptimizerConfig):
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

    def __init__(self, params: Sequence[dict[str, Any]] = [], lr: float = 0.001, alpha: float = 0.9,  # noqa: B006
                 beta: float = 0.999, lambda_coef: float = 0.0, epsilon: float = 1e-8, max_norm_clip: float = 1.0,
                 do_bias_correction: bool = True,
                 weight_decay_mode: AdamConfig.DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE) -> None:
        def check(values: dict[str, Any]) -> None:
            mode = values.pop("weight_decay_mode")
            _check_moments(lambda_coef=values.pop("lambda"), **values)
            _check(isinstance(mode, AdamConfig.DecayMode), "'weight_decay_mode' must be a AdamConfig.DecayMode")

        own = {"alpha": alpha, "beta": beta, "lambda": lambda_coef, "epsilon": epsilon, "max_norm_clip": max_norm_clip,
               "do_bias_correction": do_bias_correction, "weight_decay_mode": weight_decay_mode}
        check(dict(own))
        super().__init__("AdamOptimizer", params, {"lr": lr, **own})
        _finish(self, check)


class LambConfig(_OptimizerConfig):
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

    def __init__(self, params: Sequence[dict[str, Any]] = [], lr: float = 0.001, alpha: float = 0.9,  # noqa: B006
                 beta: float = 0.999, lambda_coef: float = 0.0, ratio_min: float = float("-inf"),
                 ratio_max: float = float("inf"), epsilon: float = 1e-6, max_norm_clip: float = 1.0,
                 do_bias_correction: bool = False) -> None:
        def check(values: dict[str, Any]) -> None:
            limits = [values.pop("ratio_min"), values.pop("ratio_max")]
            _check_moments(lambda_coef=values.pop("lambda"), **values)
            for name, value in zip(("ratio_min", "ratio_max"), limits):
                _check(isinstance(value, float), f"'{name}' must be a float")
            _check(limits[0] <= limits[1], "'ratio_min' must be at most 'ratio_max'")

        own = {"alpha": alpha, "beta": beta, "lambda": lambda_coef, "ratio_min": ratio_min, "ratio_max": ratio_max,
               "epsilon": epsilon, "max_norm_clip": max_norm_clip, "do_bias_correction": do_bias_correction}
        check(dict(own))
        super().__init__("LambOptimizer", params, {"lr": lr, **own})
        _finish(self, check)
        for group in self.params:
            for name in ("ratio_min", "ratio_max", "do_bias_correction"):
                _check(group[name] == own[name], f"'{name}' must be the same for all weights of LAMB")
