"""The trainer of onnxruntime 1.0 to 1.4, as `onnxruntime.capi.ort_trainer` has it: descriptions by class, the optimizer
by name, the rate at each step. A face of orttrainer.py's: it translates arguments, and has no step of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import onnx
import torch
from torch import Tensor

from onnxtrain._export.exported import OPSETS
from onnxtrain.training import amp, checkpoint, orttrainer
from onnxtrain.training._info import TrainStepInfo
from onnxtrain.training._models import alone, parameters_of
from onnxtrain.training.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from onnxtrain.training.optim.lr_scheduler import _LRScheduler
from onnxtrain.training.orttrainer_options import ORTTrainerOptions

__all__ = ["IODescription", "LossScaler", "ModelDescription", "ORTTrainer", "generate_sample", "load_checkpoint",
           "save_checkpoint"]

_CONFIGS: dict[str, type[AdamConfig | LambConfig | SGDConfig]] = {
    "SGDOptimizer": SGDConfig, "AdamOptimizer": AdamConfig, "LambOptimizer": LambConfig}


class IODescription:
    """An input or output.

    Args:
        name: of a parameter of forward, or any name for an output.
        shape: sizes, and names for those that may change.
        dtype: of torch; only generate_sample() needs it.
        num_classes: generate_sample() draws whole numbers below it.
    """

    def __init__(self, name: str, shape: Sequence[int | str], dtype: torch.dtype | None = None,
                 num_classes: int | None = None) -> None:
        self.name_ = name
        self.shape_ = shape
        self.dtype_ = dtype
        self.num_classes_ = num_classes


class ModelDescription:
    """Inputs and outputs of a model and its loss, which is the first output."""

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_ = list(inputs)
        self.outputs_ = list(outputs)


def generate_sample(desc: IODescription, device: torch.device | str | None = None) -> Tensor:
    """A random tensor of a description: sizes that have names are 1; whole numbers where there are classes."""
    size = [1 if isinstance(size, str) else size for size in desc.shape_]
    if desc.num_classes_:
        return torch.randint(0, desc.num_classes_, size, dtype=desc.dtype_ or torch.int64).to(device)
    return torch.randn(size, dtype=desc.dtype_).to(device)


class Scaler(Protocol):
    """What an ORTTrainer asks of a loss scaler."""

    loss_scale_: float

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """Sets the scale of the next step, after one whose gradients were finite or not."""


class LossScaler:
    """Scales the loss by a constant, or doubles the scale after so many finite steps in a row and halves it after one
    that was not.

    Args:
        loss_scale_input_name: of the input that the scale is.
        is_dynamic_scale: False keeps the scale as it is.
        loss_scale: the first one.
        up_scale_window: finite steps before it is doubled.
        min_loss_scale, max_loss_scale: its limits.
    """

    def __init__(self, loss_scale_input_name: str, is_dynamic_scale: bool, loss_scale: float = float(1 << 16),
                 up_scale_window: int = 2000, min_loss_scale: float = 1.0,
                 max_loss_scale: float = float(1 << 24)) -> None:
        self.loss_scale_input_name_ = loss_scale_input_name
        self.is_dynamic_scale_ = is_dynamic_scale
        self.initial_loss_scale_ = self.loss_scale_ = float(loss_scale)
        self.up_scale_window_ = up_scale_window
        self.min_loss_scale_, self.max_loss_scale_ = min_loss_scale, max_loss_scale
        self.stable_steps_ = 0

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """See Scaler."""
        if not self.is_dynamic_scale_:
            return
        if not is_all_finite:
            self.loss_scale_ = max(self.min_loss_scale_, self.loss_scale_ / 2)
            self.stable_steps_ = 0
            return
        self.stable_steps_ += 1
        if self.stable_steps_ >= self.up_scale_window_:
            self.loss_scale_ = min(self.max_loss_scale_, self.loss_scale_ * 2)
            self.stable_steps_ = 0

    def reset(self) -> None:
        """Back to the first scale."""
        self.loss_scale_ = self.initial_loss_scale_
        self.stable_steps_ = 0


class _ByName(_OptimizerConfig):
    """An optimizer by its name.

    Args:
        name: one of _CONFIGS.
        attributes: of a weight's name gives the hyperparameters that are no defaults.
    """

    def __init__(self, name: str, attributes: Callable[[str], Mapping[str, float]] | None) -> None:
        super().__init__(name, [], _CONFIGS[name]().defaults)
        self._attributes = attributes

    def of(self, weight: str) -> dict[str, float]:
        """See _OptimizerConfig.

        Raises:
            ValueError: a value is no number, or no hyperparameter has its name.
        """
        values = super().of(weight)
        given = {} if self._attributes is None else self._attributes(weight)
        for name, value in given.items():
            if not isinstance(value, (int, float)):
                raise ValueError("Optimizer attributes must be either float or int.")
            if name not in values:
                raise ValueError(f"{name} is not an attribute of {self.name}, which has {', '.join(values) or 'none'}")
        return {**values, **given}


class _Rate(_LRScheduler):
    """The rate of this step, which train_step() sets."""

    rate: float | Tensor = 0.0

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        return [float(self.rate)]


class _Scale(amp.LossScaler):
    """The loss scale of this step, which train_step() sets."""

    def __init__(self, trainer: ORTTrainer) -> None:
        super().__init__(1.0)
        self._trainer = trainer

    @property
    def asked(self) -> Scaler | None:
        """The trainer's own scaler, if it has one."""
        return self._trainer.loss_scaler_

    def update(self, train_step_info: TrainStepInfo) -> float:
        if self.asked is not None:
            self.asked.update_loss_scale(train_step_info.all_finite)
        return self.loss_scale


class ORTTrainer:
    """Trains a model: forward, backward and update in one call of train_step(), or of the trainer itself.

    Args:
        model: a torch.nn.Module, whose parameters are trained where they are, or an onnx.ModelProto.
        loss_fn: takes the module's output and the last input; None where the model gives its loss itself.
        model_desc: inputs by name, or by position where forward takes as many; the first output is the loss.
        training_optimizer_name: "SGDOptimizer", "AdamOptimizer" or "LambOptimizer".
        map_optimizer_attributes: of a weight's name gives hyperparameters (alpha, beta, lambda, epsilon, max_norm_clip,
            do_bias_correction, weight_decay_mode, ratio_min, ratio_max); the others are AdamConfig's and LambConfig's
            defaults. None: all are.
        learning_rate_description: the name under which train_step() may get the rate.
        device: where the model runs.
        gradient_accumulation_steps: calls for one update.
        world_rank, world_size: of the processes that train together; see docs/trainer.md.
        deepspeed_zero_stage: 1 divides the optimizer's state among them.
        enable_adasum: combine their updates by Adasum instead of averaging gradients.
        use_mixed_precision: float16 by autocast, with a loss scale.
        global_step: updates so far, for get_lr_this_step.
        get_lr_this_step: of the number of updates so far gives the rate, which train_step() does not get then.
        loss_scaler: a Scaler, which train_step() asks for the scale; else it gets the scale.
        enable_grad_norm_clip: whether Adam and LAMB clip gradients to max_norm_clip, together.
        frozen_weights: names of weights that stay as they are.
        _opset_version: of what save_as_onnx() writes of a module, and of what _extra_postprocess gets; 20 where None.
        _extra_postprocess: changes the ModelProto that is trained and saved, in place, or gives another. Of a module it
            gets the exported graph, once for each graph.
        postprocess_model: the same, under its name of 2020.
        _use_deterministic_compute: use deterministic algorithms.

    The others have no effect.

    Raises:
        ValueError: an unknown optimizer or opset, or a model of another type.
    """

    def __init__(self, model: torch.nn.Module | onnx.ModelProto, loss_fn: Callable[[Any, Any], Tensor] | None,
                 model_desc: ModelDescription, training_optimizer_name: str,
                 map_optimizer_attributes: Callable[[str], Mapping[str, float]] | None,
                 learning_rate_description: IODescription, device: torch.device | str,
                 gradient_accumulation_steps: int = 1, world_rank: int = 0, world_size: int = 1,
                 use_mixed_precision: bool = False, allreduce_post_accumulation: bool = False, global_step: int = 0,
                 get_lr_this_step: Callable[[int], float | Tensor] | None = None, loss_scaler: Scaler | None = None,
                 deepspeed_zero_stage: int = 0, enable_grad_norm_clip: bool = True,
                 frozen_weights: Sequence[str] = (), _opset_version: int | None = None,
                 _enable_internal_postprocess: bool = True,
                 _extra_postprocess: Callable[[onnx.ModelProto], onnx.ModelProto | None] | None = None,
                 _use_deterministic_compute: bool = False, use_memory_efficient_gradient: bool = False,
                 run_symbolic_shape_infer: bool = False, enable_adasum: bool = False,
                 optimized_model_filepath: str = "", *,
                 postprocess_model: Callable[[onnx.ModelProto], onnx.ModelProto | None] | None = None,
                 partition_optimizer: bool = False) -> None:
        if training_optimizer_name not in _CONFIGS:
            raise ValueError(f"training_optimizer_name is {training_optimizer_name!r}, expected one of "
                             f"{', '.join(_CONFIGS)}")
        if _opset_version is not None and not 1 <= _opset_version <= OPSETS[1]:
            raise ValueError(f"_opset_version is {_opset_version}, expected 1 to {OPSETS[1]}")
        self.model_desc_ = model_desc
        self.torch_model_ = model if isinstance(model, torch.nn.Module) else None
        self.loss_fn_ = loss_fn
        self.device_ = torch.device(device)
        self.deepspeed_zero_stage_ = max(deepspeed_zero_stage, int(partition_optimizer))
        self.world_rank, self.world_size = world_rank, world_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.use_mixed_precision = use_mixed_precision
        self.get_lr_this_step_ = get_lr_this_step
        self.loss_scaler_ = loss_scaler
        self.learning_rate_description_ = learning_rate_description
        self.loss_scale_input_name = getattr(loss_scaler, "loss_scale_input_name_", "default_loss_scale_input_name")
        self._is_train = True
        self._rate, self._scale = _Rate(), _Scale(self)
        options = self._options()
        options.distributed.enable_adasum = enable_adasum
        options.utils.frozen_weights, options.utils.grad_norm_clip = list(frozen_weights), enable_grad_norm_clip
        options.debug.deterministic_compute = _use_deterministic_compute
        options.debug.graph_save_paths.optimized_model_filepath = optimized_model_filepath
        options._internal_use.extra_postprocess = _extra_postprocess or postprocess_model
        if _opset_version is not None:
            options._internal_use.onnx_opset_version = _opset_version
        inputs = [(item.name_, list(item.shape_)) for item in model_desc.inputs_]
        outputs = [(item.name_, list(item.shape_), place == 0) for place, item in enumerate(model_desc.outputs_)]
        self._trainer = orttrainer.ORTTrainer(model, {"inputs": inputs, "outputs": outputs},
                                              _ByName(training_optimizer_name, map_optimizer_attributes),
                                              options=options)
        self.global_step_ = global_step
        if self.torch_model_ is not None:
            self._trainer.loss_fn = loss_fn  # which may have other parameters that have defaults
            count = len(inputs) - (loss_fn is not None)
            self._trainer._by_position = len(parameters_of(self.torch_model_)[0]) == count

    def _options(self) -> ORTTrainerOptions:
        """The newer form's, of what this one keeps as attributes."""
        options = ORTTrainerOptions({"device": {"id": str(self.device_)}})
        options.batch.gradient_accumulation_steps = self.gradient_accumulation_steps
        options.distributed.world_rank, options.distributed.world_size = self.world_rank, self.world_size
        options.distributed.deepspeed_zero_optimization.stage = self.deepspeed_zero_stage_
        options.lr_scheduler = self._rate
        options.mixed_precision.enabled = self.use_mixed_precision
        options.mixed_precision.loss_scaler = self._scale if self.use_mixed_precision else None
        return options

    @property
    def session(self) -> Any:
        """A TrainingSession; None before the first step."""
        return self._trainer._training_session

    @property
    def onnx_model_(self) -> onnx.ModelProto | None:
        """In evaluation, with the weights of when it was made: first asked for, or last saved. None before a step."""
        return self._trainer._onnx_model

    @property
    def global_step_(self) -> int:
        """Updates so far."""
        return self._trainer._train_step_info.optimization_step

    @global_step_.setter
    def global_step_(self, count: int) -> None:
        self._trainer._train_step_info.optimization_step = count

    @property
    def current_step(self) -> int:
        """Calls of train_step() so far."""
        return self._trainer._train_step_info.step

    @current_step.setter
    def current_step(self, count: int) -> None:
        self._trainer._train_step_info.step = count

    # ---- steps ----

    def train(self) -> None:
        """From now on calling the trainer is train_step()."""
        self._is_train = True

    def eval(self) -> None:
        """From now on calling the trainer is eval_step()."""
        self._is_train = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.train_step(*args, **kwargs) if self._is_train else self.eval_step(*args, **kwargs)

    def train_step(self, *args: object, fetches: Sequence[str] | None = None, **kwargs: object) -> Any:
        """One step, and after every gradient_accumulation_steps of them an update.

        Args:
            args, kwargs: the inputs, in the description's order (one list stands for all) or by name; then the rate, a
                tensor of one element, unless the trainer has get_lr_this_step; then with mixed precision the loss
                scale, a tensor of one element, unless it has a loss scaler.
            fetches: names of outputs to return.

        Returns:
            The outputs, detached, in a list as described; a single one alone. With mixed precision and without a loss
            scaler the last item, at an update, is whether all gradients were finite: bool of shape (1,).

        Raises:
            ValueError: an input is missing or is not known. RuntimeError: an output is not as described.
        """
        names = [described.name_ for described in self.model_desc_.inputs_]
        wanted, external = list(names), self.use_mixed_precision and self.loss_scaler_ is None
        if self.get_lr_this_step_ is None:
            wanted.append(self.learning_rate_description_.name_)
        if external:
            wanted.append(self.loss_scale_input_name)
        values = _bound(wanted, args, kwargs)
        if len(values) < len(wanted):
            raise ValueError(f"train_step takes {wanted}, but got {list(values)}")
        inputs = [values[name] for name in names]
        self._trainer._ready(inputs)  # what has been loaded says how far the run is
        if self.get_lr_this_step_ is None:
            self._rate.rate = values[self.learning_rate_description_.name_]
        else:
            self._rate.rate = self.get_lr_this_step_(self.global_step_)
        if external:
            self._scale.loss_scale = float(values[self.loss_scale_input_name])
        elif self.use_mixed_precision and self.loss_scaler_ is not None:
            self._scale.loss_scale = float(self.loss_scaler_.loss_scale_)
        outputs = self._trainer._train(inputs, list(fetches or ()))
        if external and self.current_step % self.gradient_accumulation_steps == 0:
            outputs.append(torch.tensor([self._trainer._train_step_info.all_finite]))
        return alone(outputs)

    def eval_step(self, *args: object, fetches: Sequence[str] | None = None, **kwargs: object) -> Any:
        """The outputs in evaluation, of the inputs in the description's order or by name; those at the end may be left
        out where the outputs can do without them.

        Args:
            fetches: names of outputs to return.
        """
        names = [described.name_ for described in self.model_desc_.inputs_]
        values = _bound(names, args, kwargs)
        if list(values) != names[:len(values)]:
            raise ValueError(f"eval_step takes the first of {names}, but got {list(values)}")
        outputs = self._trainer._evaluate(list(values.values()), list(fetches or ()))
        return alone([outputs[name] for name in fetches or outputs])

    # ---- state ----

    def save_as_onnx(self, path: str) -> None:
        """Writes the model and its loss in evaluation, with the weights as they are; as orttrainer's. Before the first
        step there is a warning and no file.
        """
        self._trainer.save_as_onnx(path)

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, Tensor]:
        """Weights, frozen ones and buffers by name, and the optimizer's state: see
        checkpoint.experimental_state_dict(). Copies, on the CPU; empty, with a warning, before the first step.
        """
        return checkpoint.experimental_state_dict(self._trainer, include_optimizer_state)

    def load_state_dict(self, state_dict: Mapping[str, checkpoint.TensorLike], strict: bool = False) -> None:
        """Loads what state_dict() gives; before the first step it is kept until then.

        Raises:
            RuntimeError: strict, and names are missing or unknown. ValueError: a value has another shape.
        """
        checkpoint.experimental_load_state_dict(self._trainer, state_dict, strict)


def _bound(names: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """Arguments by name, in the order of the names; one list stands for all that are given by position.

    Raises:
        ValueError: one is not known, or is given twice.
    """
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        args = args[0]
    given = dict(zip(names, args))
    wrong = [name for name in kwargs if name in given or name not in names]
    if len(args) > len(names) or wrong:
        raise ValueError(f"the inputs are {list(names)}, but the call gives {len(args)} by position and {list(kwargs)} "
                         "by name")
    return {name: given[name] if name in given else kwargs[name] for name in names if name in given or name in kwargs}


def save_checkpoint(ort_trainer: ORTTrainer, checkpoint_dir: str, checkpoint_prefix: str = checkpoint.PREFIX,
                    checkpoint_state_dict: Mapping[str, object] | None = None,
                    include_optimizer_state: bool = True) -> None:
    """Writes ``{checkpoint_dir}/{checkpoint_prefix}.ort.pt``: see checkpoint.experimental_save_checkpoint()."""
    checkpoint.experimental_save_checkpoint(ort_trainer._trainer, os.fspath(checkpoint_dir), checkpoint_prefix,
                                            checkpoint_state_dict, include_optimizer_state)


def load_checkpoint(ort_trainer: ORTTrainer, checkpoint_dir: str, checkpoint_prefix: str = checkpoint.PREFIX,
                    strict: bool = False) -> dict[str, Any]:
    """Loads what save_checkpoint() wrote, and returns the caller's entries."""
    return checkpoint.experimental_load_checkpoint(ort_trainer._trainer, os.fspath(checkpoint_dir), checkpoint_prefix,
                                                   strict)
