"""Options of an ORTTrainer have their defaults, and wrong ones are named all at once."""

import pytest

from onnxtrain.training import ORTTrainerOptions

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


def test_data_parallel_size_is_computed():
    made = ORTTrainerOptions({"distributed": {"world_size": 8, "horizontal_parallel_size": 2, "data_parallel_size": 3}})
    assert made.distributed.data_parallel_size == 4
