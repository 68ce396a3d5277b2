"""Configurations of optimizers have their defaults and groups, and refuse wrong values."""

import math

import pytest

from onnxtrain.training import optim


def test_config_defaults():
    adam, lamb = optim.AdamConfig(), optim.LambConfig()
    assert (adam.name, adam.lr, adam.alpha, adam.beta, adam.lambda_coef, adam.epsilon, adam.max_norm_clip,
            adam.do_bias_correction, adam.weight_decay_mode) == (
        "AdamOptimizer", 0.001, 0.9, 0.999, 0.0, 1e-8, 1.0, True, optim.AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE)
    assert (lamb.name, lamb.epsilon, lamb.ratio_min, lamb.ratio_max, lamb.do_bias_correction) == (
        "LambOptimizer", 1e-6, -math.inf, math.inf, False)
    assert optim.SGDConfig(lr=0.5).lr == 0.5 and adam.DecayMode.AFTER_WEIGHT_UPDATE == 1


@pytest.mark.parametrize("config", [optim.AdamConfig, optim.LambConfig])
def test_groups(config):
    given = {"params": ["a"], "alpha": 0.1, "lambda_coef": 0.5}
    made = config([given], alpha=0.2)
    assert made.of("a")["alpha"] == 0.1 and made.of("b")["alpha"] == 0.2
    assert made.of("a")["lambda"] == 0.5 and made.params[0]["beta"] == 0.999
    assert given == {"params": ["a"], "alpha": 0.1, "lambda_coef": 0.5}  # the caller's


@pytest.mark.parametrize("make, message", [
    (lambda: optim.AdamConfig([{"params": ["a"]}]), "at least one hyperparameter"),
    (lambda: optim.AdamConfig([{"params": ["a"], "lr": 0.1}]), "'lr' is not supported inside params"),
    (lambda: optim.AdamConfig([{"params": ["a"], "ratio_min": 0.1}]), "'ratio_min' of a group is not a hyperparameter"),
    (lambda: optim.AdamConfig([{"alpha": 0.1}]), "must be a dict with 'params'"),
    (lambda: optim.AdamConfig([{"params": ["a"], "alpha": -0.1}]), "'alpha' must be a positive number"),
    (lambda: optim.AdamConfig(lr=-1), "lr must be a positive number"),
    (lambda: optim.AdamConfig(max_norm_clip=0), "'max_norm_clip' must be a positive number"),
    (lambda: optim.AdamConfig(do_bias_correction=1), "'do_bias_correction' must be a boolean"),
    (lambda: optim.AdamConfig(weight_decay_mode=0), "'weight_decay_mode' must be a AdamConfig.DecayMode"),
    (lambda: optim.LambConfig(ratio_min=1), "'ratio_min' must be a float"),
    (lambda: optim.LambConfig([{"params": ["a"], "ratio_max": 2.0}]), "must be the same for all weights of LAMB"),
    (lambda: optim._OptimizerConfig("Foo", [], {"lr": 1}), "'name' must be one of"),
    (lambda: optim._OptimizerConfig("SGDOptimizer", {}, {"lr": 1}), "'params' must be a list"),
    (lambda: optim._OptimizerConfig("SGDOptimizer", [], []), "'defaults' must be a dict"),
    (lambda: optim._OptimizerConfig("SGDOptimizer", [], {}), "must contain a 'lr'"),
])
def test_config_errors(make, message):
    with pytest.raises(AssertionError, match=message):
        make()


def test_sgd_takes_no_groups():
    with pytest.raises(AssertionError) as error:
        optim.SGDConfig([{"params": ["a"], "lr": 1.0}])
    assert str(error.value) == "'params' must be an empty list for SGD optimizer"
