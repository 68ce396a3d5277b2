"""ORTTrainerOptions: what an ORTTrainer does beside its model and optimizer. One schema makes defaults and checks."""

from __future__ import annotations

import logging
from typing import Any

import torch

from onnxtrain import UnsupportedError
from onnxtrain.ortmodule.experimental.json_config import PropagateCastOpsStrategy
from onnxtrain.training import _validation as of
from onnxtrain.training._opset import OPSET
from onnxtrain.training.amp.loss_scaler import LossScaler
from onnxtrain.training.optim.lr_scheduler import _LRScheduler

__all__ = ["ORTTrainerOptions", "PropagateCastOpsStrategy"]

_log = logging.getLogger("onnxtrain")


def _is_session_options(value: object) -> bool:
    return type(value).__name__ == "SessionOptions"


_PIPELINE: of.Schema = {
    "pipeline_parallel_size": of.integer(1, 1), "num_pipeline_micro_batches": of.integer(1, 1),
    "pipeline_cut_info_string": of.string(""), "sliced_schema": of.mapping(), "sliced_axes": of.mapping(),
    "sliced_tensor_names": of.listed(),
}
_PATHS: of.Schema = {name: of.string("") for name in (
    "model_after_graph_transforms_path", "model_with_gradient_graph_path", "model_with_training_graph_path",
    "model_with_training_graph_after_optimization_path")}
SCHEMA: of.Schema = {
    "batch": {"gradient_accumulation_steps": of.integer(1, 1)},
    "device": {"id": of.string("cuda"), "mem_limit": of.integer(0, 0)},
    "distributed": {
        "world_rank": of.integer(0, 0), "world_size": of.integer(1, 1), "local_rank": of.integer(0, 0),
        "data_parallel_size": of.integer(1, 1), "horizontal_parallel_size": of.integer(1, 1),
        "pipeline_parallel": _PIPELINE, "allreduce_post_accumulation": of.flag(False),
        "deepspeed_zero_optimization": {"stage": of.integer(0, 0, 1)}, "enable_adasum": of.flag(False),
    },
    "lr_scheduler": of.instance("lr_scheduler", lambda value: isinstance(value, _LRScheduler)),
    "mixed_precision": {
        "enabled": of.flag(False),
        "loss_scaler": of.instance("loss_scaler", lambda value: isinstance(value, LossScaler)),
    },
    "graph_transformer": {
        "attn_dropout_recompute": of.flag(False), "gelu_recompute": of.flag(False),
        "transformer_layer_recompute": of.flag(False), "number_recompute_layers": of.integer(0, 0),
        "propagate_cast_ops_config": {
            "strategy": of.Field("propagate_cast_ops_strategy",
                                 lambda value: isinstance(value, PropagateCastOpsStrategy),
                                 PropagateCastOpsStrategy.FLOOD_FILL),
            "level": of.integer(1, -1), "allow": of.listed(),
        },
    },
    "utils": {
        "frozen_weights": of.listed(), "grad_norm_clip": of.flag(True), "memory_efficient_gradient": of.flag(False),
        "run_symbolic_shape_infer": of.flag(False),
    },
    "debug": {"deterministic_compute": of.flag(False), "check_model_export": of.flag(False),
              "graph_save_paths": _PATHS},
    "_internal_use": {
        "enable_internal_postprocess": of.flag(True), "extra_postprocess": of.instance("callable", callable),
        "onnx_opset_version": of.integer(14, 12, 14), "enable_onnx_contrib_ops": of.flag(True),
    },
    "provider_options": of.mapping(),
    "session_options": of.instance("session_options", _is_session_options),
}


class _Group:
    """A dict of options as attributes; dicts below it are groups, unless the schema says that they are values."""

    def __init__(self, schema: of.Schema, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value if isinstance(below := schema[name], of.Field) else _Group(below, value))

    def __repr__(self) -> str:
        return repr(vars(self))


class ORTTrainerOptions:
    """Options of an ORTTrainer, checked; docs/trainer.md lists them.

    Args:
        options: nested dict; what is missing has its default.

    Attributes:
        batch, device, distributed, lr_scheduler, mixed_precision, graph_transformer, utils, debug, _internal_use,
        provider_options, session_options: values and groups of values, which may be assigned to until a trainer takes
            its first step.

    Raises:
        ValueError: an option is not known, or has a value of another type or range; the message names all of them.
    """

    batch: Any
    device: Any
    distributed: Any
    lr_scheduler: Any
    mixed_precision: Any
    graph_transformer: Any
    utils: Any
    debug: Any
    _internal_use: Any
    provider_options: dict[str, Any]
    session_options: object

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        options = {} if options is None else options
        if not isinstance(options, dict):
            raise ValueError(f"Invalid options: a {type(options).__name__}, expected a dict")
        self._original_opts = dict(options)
        self._validated_opts, errors = of.filled(SCHEMA, options)
        if errors:
            raise ValueError(f"Invalid options: {errors}")
        distributed = self._validated_opts["distributed"]
        distributed["data_parallel_size"] = max(1, distributed["world_size"] // distributed["horizontal_parallel_size"])
        for name, value in self._validated_opts.items():
            setattr(self, name, value if isinstance(below := SCHEMA[name], of.Field) else _Group(below, value))
        # What is not given is what the trainer does; _validated_opts has the defaults that scripts compare.
        if "onnx_opset_version" not in options.get("_internal_use", {}):
            self._internal_use.onnx_opset_version = OPSET
        if "id" not in options.get("device", {}) and not torch.cuda.is_available():
            self.device.id = "cpu"
            _log.info("ORTTrainerOptions: device.id is not given, and torch has no CUDA device here: the trainer runs "
                      "on the CPU")

    def __repr__(self) -> str:
        return repr({name: getattr(self, name) for name in SCHEMA})


def refuse_unsupported(options: ORTTrainerOptions) -> None:
    """Called before a trainer's first step.

    Raises:
        UnsupportedError: an option asks for what is not there; the message names it.
        ValueError: a loss scaler without mixed precision.
    """
    distributed = options.distributed
    for name, value in (("horizontal_parallel_size", distributed.horizontal_parallel_size),
                        ("pipeline_parallel.pipeline_parallel_size",
                         distributed.pipeline_parallel.pipeline_parallel_size)):
        if value != 1:
            raise UnsupportedError(f"ORTTrainerOptions: distributed.{name} is {value}: every process has the whole "
                                   "model; only 1 is supported")
    if options.mixed_precision.loss_scaler is not None and not options.mixed_precision.enabled:
        raise ValueError("Loss Scaler cannot be specified when Mixed Precision is not enabled")


def warn_of_ignored(options: ORTTrainerOptions) -> None:
    """A warning for each option that is set and has no effect here."""
    for name, value, reason in (
            ("device.mem_limit", options.device.mem_limit, "memory is planned, and not limited"),
            ("utils.memory_efficient_gradient", options.utils.memory_efficient_gradient,
             "the memory plan decides what is kept"),
            ("provider_options", options.provider_options, "there are no execution providers"),
            ("session_options", options.session_options, "sessions have no such options")):
        if value:
            _log.warning("ORTTrainerOptions: %s has no effect in onnxtrain: %s", name, reason)
