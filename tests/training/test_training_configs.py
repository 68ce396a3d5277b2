"""What a trainer takes: optimizer configurations, schedulers, loss scalers, options and descriptions; every message."""

import math

import pytest
import torch

from onnxtrain.training import ORTTrainerOptions, TrainStepInfo, amp, optim
from onnxtrain.training import model_desc_validation as described

DEFAULTS = {
    "batch": {"gradient_accumulation_steps": 1},
    "device": {"id": "cuda", "mem_limit": 0},
    "distributed": {
        "world_rank": 0, "world_size": 1, "local_rank": 0, "data_parallel_size": 1, "horizontal_parallel_size": 1,
        "pipeline_parallel": {"pipeline_parallel_size": 1, "num_pipeline_micro_batches": 1,
                              "pipeline_cut_info_string": "", "sliced_schema": {}, "sliced_axes": {},
                              "sliced_tensor_names": []},
        "allreduce_post_accumulation": False, "deepspeed_zero_optimization": {"stage": 0}, "enable_adasum": False},
    "lr_scheduler": None,
    "mixed_precision": {"enabled": False, "loss_scaler": None},
    "graph_transformer": {"attn_dropout_recompute": False, "gelu_recompute": False,
                          "transformer_layer_recompute": False, "number_recompute_layers": 0,
                          "propagate_cast_ops_config": {"strategy": 1, "level": 1, "allow": []}},
    "utils": {"frozen_weights": [], "grad_norm_clip": True, "memory_efficient_gradient": False,
              "run_symbolic_shape_infer": False},
    "debug": {"deterministic_compute": False, "check_model_export": False,
              "graph_save_paths": {"model_after_graph_transforms_path": "", "model_with_gradient_graph_path": "",
                                   "model_with_training_graph_path": "",
                                   "model_with_training_graph_after_optimization_path": ""}},
    "_internal_use": {"enable_internal_postprocess": True, "extra_postprocess": None, "onnx_opset_version": 14,
                      "enable_onnx_contrib_ops": True},
    "provider_options": {}, "session_options": None}


@pytest.mark.parametrize("given", [{}, {"batch": {}, "device": {}, "distributed": {}, "utils": {}}])
def test_option_defaults(given):
    made = ORTTrainerOptions(given)
    assert made._validated_opts == DEFAULTS and made._original_opts == given
    assert made.batch.gradient_accumulation_steps == 1 and made.distributed.deepspeed_zero_optimization.stage == 0
    made.utils.frozen_weights = ["w"]
    assert ORTTrainerOptions(given).utils.frozen_weights == []


@pytest.mark.parametrize("given, errors", [
    ({"mixed_precision": {"enabled": 1}}, "{'mixed_precision': [{'enabled': ['must be of boolean type']}]}"),
    ({"batch": {"gradient_accumulation_steps": 0}}, "{'batch': [{'gradient_accumulation_steps': ['min value is 1']}]}"),
    ({"batch": {"gradient_accumulation_steps": True}},
     "{'batch': [{'gradient_accumulation_steps': ['must be of integer type']}]}"),
    ({"distributed": {"deepspeed_zero_optimization": {"stage": 2}}},
     "{'distributed': [{'deepspeed_zero_optimization': [{'stage': ['max value is 1']}]}]}"),
    ({"device": {"id": 0, "name": "x"}}, "{'device': [{'id': ['must be of string type'], 'name': ['unknown field']}]}"),
    ({"batch": 3, "what": 1}, "{'batch': ['must be of dict type'], 'what': ['unknown field']}"),
    ({"device": None}, "{'device': ['null value not allowed']}"),
    ({"utils": {"frozen_weights": None}}, "{'utils': [{'frozen_weights': ['null value not allowed']}]}"),
    ({"lr_scheduler": 1}, "{'lr_scheduler': ['must be of lr_scheduler type']}"),
    ({"mixed_precision": {"loss_scaler": 1}}, "{'mixed_precision': [{'loss_scaler': ['must be of loss_scaler type']}]}"),
])
def test_option_errors(given, errors):
    with pytest.raises(ValueError) as error:
        ORTTrainerOptions(given)
    assert str(error.value) == f"Invalid options: {errors}"


def test_data_parallel_size_is_computed():
    made = ORTTrainerOptions({"distributed": {"world_size": 8, "horizontal_parallel_size": 2, "data_parallel_size": 3}})
    assert made.distributed.data_parallel_size == 4


BOTH = "{{'inputs': [{{0: ['{0}']}}], 'outputs': [{{0: ['{0}']}}]}}"


@pytest.mark.parametrize("inputs, outputs, errors", [
    ([(True, [])], [(True, [])], BOTH.format("the first element of the tuple (aka name) must be a string")),
    ([("a", None)], [("a", None)], BOTH.format("the second element of the tuple (aka shape) must be a list")),
    ([("a", [True])], [("a", [1.5])], BOTH.format("each shape must be either a string or integer")),
    ([("a", [])], [("a", [], None)],
     "{'outputs': [{0: ['the third element of the tuple (aka is_loss) must be a boolean']}]}"),
    ([("a", [])], [("a", [], True), ("b", [], True)], "{'outputs': [{1: ['only one is_loss can bet set to True']}]}"),
    ([("a",)], [("a",)], "{'inputs': [{0: ['must be a tuple with size 2']}], "
                         "'outputs': [{0: ['must be a tuple with size 2 or 3']}]}"),
    ([], [("a", [])], "{'inputs': ['min length is 1']}"),
    ("a", [("a", [])], "{'inputs': ['must be of list type']}"),
])
def test_description_errors(inputs, outputs, errors):
    with pytest.raises(ValueError) as error:
        described._ORTTrainerModelDesc({"inputs": inputs, "outputs": outputs})
    assert str(error.value) == f"Invalid model_desc: {errors}"


def test_description_keys():
    with pytest.raises(ValueError) as error:
        described._ORTTrainerModelDesc({"inputz": [("a", [])], "outputs": [("a", [])]})
    assert str(error.value) == "Invalid model_desc: {'inputs': ['required field'], 'inputz': ['unknown field']}"


def test_description():
    made = described._ORTTrainerModelDesc({"inputs": [("a", ["n", 2])], "outputs": [("l", [], True), ("o", [1])]})
    assert made.inputs == [("a", ["n", 2])] and made.outputs == [("l", [], True), ("o", [1], False)] and made.loss == 0
    assert made.learning_rate == ("__learning_rate", [1], torch.float32)
    made.add_type_to_input_description(0, torch.int64)
    made.add_type_to_output_description(1, torch.float32, torch.float16)
    assert made.inputs[0].dtype == torch.int64 and isinstance(made.inputs[0], made._InputDescriptionTyped)
    assert made.outputs[1] == ("o", [1], False, torch.float32, torch.float16)
    made.all_finite, made.loss_scale_input, made.gradient_accumulation = "f", "s", "g"
    assert made.all_finite == ("f", [1], torch.bool) and made.gradient_accumulation == ("g", [1], torch.bool)
    assert made.loss_scale_input == ("s", [], torch.float32)
    with pytest.raises(AssertionError, match="no output has is_loss"):
        _ = described._ORTTrainerModelDesc({"inputs": [("a", [])], "outputs": [("o", [])]}).loss


# --- optimizers -------------------------------------------------------------------------------------------------------


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


# --- schedulers -------------------------------------------------------------------------------------------------------

WARM = [0.0, 0.2, 0.4, 0.6, 0.8]
CASES = {
    "constant": (lambda: optim.ConstantWarmupLRScheduler(10, 0.5), [*WARM, 1, 1, 1, 1, 1, 1]),
    "cosine": (lambda: optim.CosineWarmupLRScheduler(10, 0.5, 0.5),
               [*WARM, *((1 + math.cos(math.pi * k / 5)) / 2 for k in range(6))]),
    "cosine, two waves": (lambda: optim.CosineWarmupLRScheduler(10, 2.0, 0.0),
                          [(1 + math.cos(4 * math.pi * k / 10)) / 2 for k in range(10)]),
    "linear": (lambda: optim.LinearWarmupLRScheduler(10, 0.5), [*WARM, 1, 0.8, 0.6, 0.4, 0.2, 0, 0]),
    "poly": (lambda: optim.PolyWarmupLRScheduler(10, 0.1, 2.0, 0.5),
             [*WARM, *(0.9 * (1 - k / 5) ** 2 + 0.1 for k in range(6)), 0.1, 0.1]),
}


@pytest.mark.parametrize("name", CASES)
def test_scheduler(name):
    make, expected = CASES[name]
    scheduler, base = make(), 2.0 if name != "poly" else 1.0
    assert scheduler.get_last_lr() == []
    for k, value in enumerate(expected):
        info = TrainStepInfo(optim.SGDConfig(lr=base), optimization_step=k)
        scheduler._step(info)
        assert scheduler.get_last_lr() == pytest.approx([base * value], abs=1e-12)


@pytest.mark.parametrize("make, message", [
    (lambda: optim.ConstantWarmupLRScheduler(0), "total_steps must be a strict positive number"),
    (lambda: optim.ConstantWarmupLRScheduler(1.0), "total_steps must be a strict positive number"),
    (lambda: optim.LinearWarmupLRScheduler(1, 1.0), "warmup must be a float"),
    (lambda: optim.LinearWarmupLRScheduler(1, 0), "warmup must be a float"),
    (lambda: optim.CosineWarmupLRScheduler(1, 0.0), "cycles must be a positive float"),
    (lambda: optim.PolyWarmupLRScheduler(1, -1.0), "lr_end must be a positive float"),
    (lambda: optim.PolyWarmupLRScheduler(1, power=1), "power must be a positive float"),
    (lambda: optim.PolyWarmupLRScheduler(1, 1.0).get_lr(TrainStepInfo(optim.SGDConfig())), "must be smaller than"),
    (lambda: optim.ConstantWarmupLRScheduler(1)._step(None), "must be a TrainStepInfo"),
])
def test_scheduler_errors(make, message):
    with pytest.raises(AssertionError, match=message):
        make()


# --- loss scalers and step info ---------------------------------------------------------------------------------------


def test_dynamic_loss_scaler():
    scaler, info = amp.DynamicLossScaler(up_scale_window=3, max_loss_scale=2.0**18), TrainStepInfo(optim.LambConfig())
    assert [scaler.update(info) for _ in range(9)] == [2.0**16] * 2 + [2.0**17] * 3 + [2.0**18] * 4
    info.all_finite = False
    assert [scaler.update(info) for _ in range(20)] == [max(1.0, 2.0 ** (17 - k)) for k in range(20)]
    scaler.reset()
    assert scaler.loss_scale == 2.0**16 and scaler._stable_steps_count == 0
    fixed = amp.DynamicLossScaler(automatic_update=False, loss_scale=3, min_loss_scale=5, max_loss_scale=10)
    assert fixed.update(info) == fixed.loss_scale == 3


@pytest.mark.parametrize("make", [
    lambda: amp.DynamicLossScaler(1), lambda: amp.DynamicLossScaler(loss_scale=0),
    lambda: amp.DynamicLossScaler(up_scale_window=0), lambda: amp.DynamicLossScaler(min_loss_scale=-1.0),
    lambda: amp.DynamicLossScaler(max_loss_scale="x"), lambda: amp.LossScaler(-1.0),
    lambda: setattr(amp.LossScaler(1.0), "input_name", "")])
def test_loss_scaler_errors(make):
    with pytest.raises(AssertionError):
        make()


def test_step_info():
    info = TrainStepInfo(optim.SGDConfig())
    assert (info.all_finite, info.fetches, info.optimization_step, info.step) == (True, [], 0, 0)
    for wrong in (-1, "Hello", None):
        with pytest.raises(AssertionError):
            TrainStepInfo(wrong)
        for name in ("all_finite", "optimization_step", "step"):
            with pytest.raises(AssertionError):
                TrainStepInfo(optim.SGDConfig(), **{name: wrong})
    with pytest.raises(AssertionError):
        TrainStepInfo(optim.SGDConfig(), fetches="loss")
