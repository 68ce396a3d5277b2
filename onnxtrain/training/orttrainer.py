"""ORTTrainer: trains a model by its description, in onnxruntime-training's form of 2020 to 2023.

It reads description and options; _trainer_step.py does the steps. legacy.py puts the form before that on it.
docs/trainer.md is for users.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor

from onnxtrain.backend import _to_array
from onnxtrain.training import _checkpoint_storage, _state
from onnxtrain.training._distributed import Processes
from onnxtrain.training._info import TrainStepInfo
from onnxtrain.training._models import TorchModel, alone
from onnxtrain.training._onnx_model import Described, OnnxModel
from onnxtrain.training._postprocess import applied, torch_model
from onnxtrain.training._trainer_step import TrainedModel
from onnxtrain.training._update import TensorLike, as_tensor
from onnxtrain.training._validation import check
from onnxtrain.training.amp.loss_scaler import DynamicLossScaler, LossScaler
from onnxtrain.training.model_desc_validation import _ORTTrainerModelDesc
from onnxtrain.training.optim.config import _OptimizerConfig
from onnxtrain.training.orttrainer_options import ORTTrainerOptions, refuse_unsupported, warn_of_ignored

__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]

# Of debug.graph_save_paths: the engine's stage, and whether the file has the update. The last one is legacy.py's.
_STAGES = {"model_after_graph_transforms_path": ("optimized_pre_grad", False),
           "model_with_gradient_graph_path": ("optimized", False),
           "model_with_training_graph_path": ("optimized", True),
           "model_with_training_graph_after_optimization_path": ("execution_model", True),
           "optimized_model_filepath": ("execution_model", False)}


class ORTTrainer:
    """Trains a model: forward, backward and update in one call.

    Args:
        model: a torch.nn.Module, whose parameters are trained where they are, or an onnx.ModelProto.
        model_desc: ``{"inputs": [(name, shape), ...], "outputs": [(name, shape[, is_loss]), ...]}``. Inputs are
            parameters of forward by name, the last one the label where there is a loss_fn; outputs go by position. A
            size that is a string may change from step to step.
        optim_config: SGDConfig, AdamConfig or LambConfig.
        loss_fn: takes the module's output and the last input, and gives the loss, which comes before the output among
            the outputs; None where the model gives it itself.
        options: ORTTrainerOptions.

    Attributes:
        model_desc, loss_fn, optim_config, options: as given, checked.

    Raises:
        AssertionError: an argument is of another type.
        ValueError: model is neither of the two, or model_desc is malformed.

    What options ask for that is not there is refused at the first step, by onnxtrain.UnsupportedError.
    """

    _by_position = False  # whether forward gets the inputs in the description's order, whatever their names

    def __init__(self, model: torch.nn.Module | onnx.ModelProto, model_desc: dict[str, Any],
                 optim_config: _OptimizerConfig, loss_fn: Callable[[Any, Any], Tensor] | None = None,
                 options: ORTTrainerOptions | None = None) -> None:
        check(model is not None, "'model' is required and must be either a 'torch.nn.Module' or ONNX model")
        check(isinstance(model_desc, dict), "'model_desc' must be a 'dict'")
        check(isinstance(optim_config, _OptimizerConfig), "'optim_config' must be an optimizer configuration")
        check(options is None or isinstance(options, ORTTrainerOptions), "'options' must be ORTTrainerOptions or None")
        torch_module = isinstance(model, torch.nn.Module)
        if not torch_module and not isinstance(model, onnx.ModelProto):
            raise ValueError("'model' must be either 'torch.nn.Module' or 'onnx.ModelProto'")
        check(loss_fn is None or torch_module, "'loss_fn' must not be specified when 'model' is an ONNX model")
        check(loss_fn is None or callable(loss_fn) and len(inspect.signature(loss_fn).parameters) == 2,
              "'loss_fn' must be a callable of 2 parameters: prediction and label")
        self.model_desc = _ORTTrainerModelDesc(model_desc)
        self.optim_config = optim_config
        self.loss_fn = loss_fn
        self.options = ORTTrainerOptions() if options is None else options
        self._train_step_info = TrainStepInfo(optim_config)
        self._load_state_dict: functools.partial[None] | None = None
        self._trained: TrainedModel | None = None
        self._training_session: _state.TrainingSession | None = None
        self._proto: onnx.ModelProto | None = None
        self._torch_model = model if isinstance(model, torch.nn.Module) else None
        if not isinstance(model, torch.nn.Module):
            self._proto = onnx.ModelProto()
            self._proto.CopyFrom(model)
            self._proto = applied(self.options._internal_use.extra_postprocess, self._proto)
            self._init_session()

    # ---- the session ----

    def _init_session(self, optimizer_state: Mapping[str, Mapping[str, TensorLike]] = {},  # noqa: B006
                      session_options: object = None, provider_options: object = None) -> None:
        """Gets ready for steps, if that has not been done, and gives the optimizer this state.

        Raises:
            AssertionError: no output is the loss.
            RuntimeError, UnsupportedError, ValueError: see TrainedModel, refuse_unsupported().
        """
        if self._trained is None:
            options, desc = self.options, self.model_desc
            refuse_unsupported(options)
            warn_of_ignored(options)
            loss = desc.loss
            if options.mixed_precision.enabled and options.mixed_precision.loss_scaler is None:
                options.mixed_precision.loss_scaler = DynamicLossScaler()
            if self._torch_model is not None:
                model: Any = torch_model(options._internal_use.extra_postprocess, self._torch_model, self.loss_fn,
                                         desc.inputs, desc.outputs, by_position=self._by_position, loss=loss,
                                         opset=options._internal_use.onnx_opset_version)
                if options.graph_transformer.transformer_layer_recompute:
                    runtime = model.ort_module._runtime
                    runtime.memory_optimization_level = max(1, runtime.memory_optimization_level)
            else:
                assert self._proto is not None
                model = OnnxModel(self._proto, desc.inputs, desc.outputs, options.mixed_precision.enabled)
            weights = model.parameters()
            unknown = [name for group in self.optim_config.params for name in group["params"] if name not in weights]
            if unknown:
                raise RuntimeError(f"{unknown} params from 'optim_config' not found in the model.")
            processes = Processes(options.distributed.world_size, options.distributed.world_rank,
                                  options.distributed.deepspeed_zero_optimization.stage,
                                  options.distributed.enable_adasum)
            self._trained = TrainedModel(
                model, self.optim_config.name, self.optim_config.of, options.utils.frozen_weights,
                options.utils.grad_norm_clip, options.batch.gradient_accumulation_steps,
                options.mixed_precision.enabled, options.debug.deterministic_compute, options.device.id, processes)
            self._trained.graphs = {path: _STAGES[name] for name, path in vars(options.debug.graph_save_paths).items()
                                    if path}
            self._training_session = _state.TrainingSession(self._trained)
        if optimizer_state:
            self._trained.load_optimizer(optimizer_state)

    def _ready(self, inputs: Sequence[object]) -> TrainedModel:
        """Before a step: the engine, with what was loaded before there was one."""
        if self._trained is None:
            self._init_session()
            if self.options.debug.check_model_export:
                self._check_export(inputs)
        if self._load_state_dict is not None:
            load, self._load_state_dict = self._load_state_dict, None
            load()
        return self._trained  # type: ignore[return-value]

    def _check_export(self, inputs: Sequence[object]) -> None:
        """Compares the engine with PyTorch, in evaluation, before anything is trained."""
        assert self._trained is not None
        given = self._trained.inputs(inputs)
        model = self._trained.model
        assert isinstance(model, TorchModel)
        ours, theirs = model.evaluate(given), model.eager(given)
        for described, one, other in zip(self.model_desc.outputs, ours, theirs):
            message = functools.partial("check_model_export: output {}: {}".format, described[0])
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-6, equal_nan=True, msg=message)

    @property
    def _onnx_model(self) -> onnx.ModelProto | None:
        """In evaluation, with the weights of when it was made: first asked for, or last saved. None before a step."""
        if self._proto is None and self._trained is not None:
            self._proto = self._trained.model.proto()
        return self._proto

    @_onnx_model.setter
    def _onnx_model(self, model: onnx.ModelProto | None) -> None:
        self._proto = model

    # ---- steps ----

    def train_step(self, *args: object, **kwargs: object) -> Any:
        """One step: outputs of the model in training, backward, and after every
        ``batch.gradient_accumulation_steps`` of them an update.

        Args:
            args, kwargs: the inputs, in the description's order or by name; one list stands for all.

        Returns:
            The outputs, detached, in a list as described; a single one alone. Those of ``_train_step_info.fetches``
            alone, where there are some. The loss is never scaled.

        Raises:
            AssertionError: another number of inputs than is described, or sizes of one name that are not equal.
            RuntimeError: no such output as in ``fetches``; an output has another size than is described.
        """
        return alone(self._train(self._inputs(args, kwargs), self._train_step_info.fetches))

    def _train(self, inputs: Sequence[object], fetches: Sequence[str]) -> list[Tensor]:
        """train_step() of inputs in the description's order; the outputs in that of fetches."""
        info, places = self._train_step_info, self._places(fetches)
        sizes_of(self.model_desc.inputs, inputs)
        trained = self._ready(inputs)
        step = info.step + 1
        scaler: LossScaler | None = self.options.mixed_precision.loss_scaler
        scale = 1.0 if scaler is None else scaler.loss_scale

        def rate() -> float:
            info.step = step
            return self._rate()

        results = trained.forward(inputs, self.model_desc.loss, step, scale, rate, places)
        outputs = self._outputs(inputs, results, fetches)
        chosen = [outputs[name] for name in fetches or outputs]
        trained.backward(results[self.model_desc.loss])
        info.step = step
        trained.save_graphs()
        if trained.is_update(step):
            info.all_finite = trained.apply()
            if scaler is not None:
                scaler.update(info)
            info.optimization_step += info.all_finite
        return chosen

    def eval_step(self, *args: object, **kwargs: object) -> Any:
        """The outputs of the model in evaluation. With ``_train_step_info.fetches`` inputs at the end may be left out.

        Args and returns are train_step()'s.
        """
        outputs = self._evaluate(self._inputs(args, kwargs), self._train_step_info.fetches)
        return alone(list(outputs.values()))

    def _evaluate(self, inputs: Sequence[object], fetches: Sequence[str]) -> dict[str, Tensor]:
        """eval_step() of inputs in the description's order; outputs by name."""
        self._places(fetches)
        sizes_of(self.model_desc.inputs, inputs)
        outputs = self._outputs(inputs, self._ready(inputs).evaluate(inputs), fetches)
        lacking = [name for name in fetches if name not in outputs]
        if lacking:
            raise RuntimeError(f"the outputs {lacking} need all inputs of the model: give them")
        return outputs

    def _rate(self) -> float:
        scheduler = self.options.lr_scheduler
        if scheduler is None:
            return self.optim_config.lr
        scheduler._step(self._train_step_info)
        return scheduler.get_last_lr()[0]

    def _places(self, fetches: Sequence[str]) -> tuple[int, ...]:
        """Places of these outputs, of all of them where there are no names.

        Raises:
            RuntimeError: there is no such output.
        """
        names = [described[0] for described in self.model_desc.outputs]
        if unknown := [name for name in fetches if name not in names]:
            raise RuntimeError("The specified fetches list contains invalid output names: "
                               f"{unknown} are not in {names}")
        return tuple(place for place, name in enumerate(names) if not fetches or name in fetches)

    def _inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[object]:
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = tuple(args[0])
        names = [described[0] for described in self.model_desc.inputs]
        left = names[len(args):]
        inputs = [*args, *(kwargs[name] for name in left if name in kwargs)]
        given = [*names[:len(args)], *kwargs]
        check(len(args) <= len(names) and set(kwargs) <= set(left)
              and (len(inputs) == len(names) or bool(self._train_step_info.fetches)
                    and [name for name in names if name in given] == names[:len(inputs)]),
              f"the description has inputs {names}, but the call gives {len(args)} by position and {list(kwargs)} by "
              "name")
        return inputs

    def _outputs(self, inputs: Sequence[object], results: Sequence[Tensor],
                 fetches: Sequence[str]) -> dict[str, Tensor]:
        """Outputs by name, in the shapes that are described, those of fetches alone where there are some; notes dtypes
        on the way.
        """
        desc = self.model_desc
        shaped = described_outputs(desc.inputs, desc.outputs, inputs, results, desc.loss, self.loss_fn is not None,
                                   fetches)
        self._note_dtypes(inputs, shaped)
        return shaped

    def _note_dtypes(self, inputs: Sequence[object], outputs: Mapping[str, Tensor]) -> None:
        desc = self.model_desc
        for place, value in enumerate(inputs):
            if len(desc.inputs[place]) == 2 and isinstance(value, Tensor):
                desc.add_type_to_input_description(place, value.dtype)
        for place, item in enumerate(desc.outputs):
            if len(item) == 3 and item[0] in outputs:
                dtype = outputs[item[0]].dtype
                desc.add_type_to_output_description(place, dtype, dtype if dtype == torch.float16 else None)

    # ---- as a file ----

    def save_as_onnx(self, path: str) -> None:
        """Writes the model, and its loss, in evaluation: no dropout, weights as they are now, under their names in the
        module.

        Args:
            path: of a file, in a folder that there is. It is replaced whole or not at all. Without a step so far, or
            such a folder, there is a warning and no file.

        Raises:
            AssertionError: path is no str.
            ExportError, UnsupportedError: the module cannot be written as operators of ONNX.
        """
        check(isinstance(path, str), "'path' must be a valid path string")
        if self._trained is None:
            warnings.warn("Training session is not initialized yet. 'train_step' or 'eval_step' methods must be "
                          "executed at least once before calling 'save_as_onnx()'.", stacklevel=2)
            return
        if not os.path.isdir(os.path.dirname(path) or "."):
            warnings.warn(f"save_as_onnx: the folder of {path} does not exist: nothing is written", stacklevel=2)
            return
        self._proto = self._trained.model.proto()
        data = self._proto.SerializeToString()
        _state.written_whole(path, lambda file: file.write(data))

    # ---- state ----

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """All that a run is continued from, as copies.

        Args:
            pytorch_format: only weights and buffers, as tensors by name.

        Returns:
            ``model``: ``{"full_precision": {name: array}}``; ``optimizer``: see Update.state(); ``trainer_options``,
            ``train_step_info``; ``loss_scaler`` with mixed precision, and ``accumulated_gradients`` within the steps of
            one update. Before the first step what has been loaded, with a warning, or an empty dict.
        """
        if self._training_session is None:
            warnings.warn("ONNX Runtime training session is not initialized yet. Please run train_step or eval_step at "
                          "least once before calling ORTTrainer.state_dict().", stacklevel=2)
            return self._load_state_dict.args[0] if self._load_state_dict else {}
        model = {kind: dict(values) for kind, values in self._training_session.get_model_state(
            include_mixed_precision_weights=False).items()}
        rest = self._untrained()
        if rest:
            model.setdefault("full_precision", {}).update(rest)
        if pytorch_format:  # with ZeRO too: weights are whole in every process
            return {name: as_tensor(value) for name, value in model.get("full_precision", {}).items()}
        options, info = self.options, self._train_step_info
        distributed = options.distributed
        zero_stage, size = distributed.deepspeed_zero_optimization.stage, distributed.world_size
        rank, replicas = distributed.world_rank, distributed.data_parallel_size
        if self._trained is not None:  # what is, not what was asked for
            processes = _state.processes_of(self._trained)
            rank, size = processes["rank"], processes["size"]
            zero_stage, replicas = int("pieces" in processes), size
        state: dict[str, Any] = {
            "model": model, "optimizer": self._training_session.get_optimizer_state(),
            "trainer_options": {
                "mixed_precision": options.mixed_precision.enabled,
                "zero_stage": zero_stage, "world_rank": rank, "world_size": size,
                "optimizer_name": self.optim_config.name, "data_parallel_size": replicas,
                "horizontal_parallel_size": distributed.horizontal_parallel_size},
            "train_step_info": {"optimization_step": info.optimization_step, "step": info.step}}
        if zero_stage > 0:
            state["partition_info"] = self._training_session.get_partition_info_map()
        if scaler := _state.scaler_state(options.mixed_precision.loss_scaler):
            state["loss_scaler"] = scaler
        if self._trained is not None and (sums := self._trained.accumulated(info.step)):
            state["accumulated_gradients"] = {name: _to_array(value) for name, value in sums.items()}
        return state

    def _untrained(self) -> dict[str, Any]:
        """Frozen weights and buffers as arrays."""
        if self._trained is not None:
            trained = self._trained.weights()
            values = {name: value for name, value in self._trained.everything().items() if name not in trained}
            return {name: _to_array(value) for name, value in _state.copied(values).items()}
        frozen = self.options.utils.frozen_weights
        initializers = self._proto.graph.initializer if self._proto is not None else ()
        return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in initializers if tensor.name in frozen}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Loads what state_dict() gives. Before the first step it is kept until then.

        Args:
            state_dict: may lack ``model``, ``optimizer`` or ``train_step_info``, with a warning for each.
            strict: refuse missing and unexpected names.

        Raises:
            RuntimeError: strict, and names differ; or it belongs to another process. AssertionError: it is of another
                optimizer. ValueError: a value has another shape.
        """
        if self._training_session is None:
            self._load_state_dict = functools.partial(self.load_state_dict, state_dict, strict=strict)
            return
        for key in ("train_step_info", "model", "optimizer"):
            if key not in state_dict:
                warnings.warn(f"Missing key: {key} in state_dict", stacklevel=2)
        if strict:
            self._check_names(state_dict)
        if "optimizer" in state_dict:
            name = state_dict["trainer_options"]["optimizer_name"]
            name = name.decode() if isinstance(name, bytes) else name
            check(name == self.optim_config.name, f"Optimizer mismatch: expected {self.optim_config.name}, got {name}")
        given, own = state_dict.get("trainer_options", {}), _state.processes_of(self._trained)
        rank, size = int(given.get("world_rank", 0)), int(given.get("world_size", 1))
        if self._trained is not None and int(given.get("zero_stage", 0)) and (rank, size) != (own["rank"], own["size"]):
            raise RuntimeError(f"the state is the part of process {rank} of {size}, but this is process {own['rank']} "
                               f"of {own['size']}: join the parts by checkpoint.aggregate_checkpoints()")
        if self._trained is not None and "accumulated_gradients" in state_dict:
            _state.check_gradients(self._trained, rank, size)
        self._update_onnx_model_initializers(state_dict.get("model", {}).get("full_precision", {}))
        self._init_session(state_dict.get("optimizer", {}))
        info = state_dict.get("train_step_info", {})
        for key in ("optimization_step", "step"):
            if key in info:
                setattr(self._train_step_info, key, int(info[key]))
        _state.load_scaler_state(self.options.mixed_precision.loss_scaler, state_dict.get("loss_scaler", {}))
        if self._trained is not None:
            self._trained.load_accumulated({name: as_tensor(value) for name, value in
                                           state_dict.get("accumulated_gradients", {}).items()})

    def _check_names(self, given: Mapping[str, Any]) -> None:
        """Compares the names of a state with the trainer's own, level by level."""
        own = self.state_dict()
        for key in ("model", "optimizer"):
            if key not in given or key not in own:
                continue
            if key == "optimizer" and self._trained is not None and self._trained.shards is not None:
                pieces = self._trained.shards.own  # other processes have the rest
                given = {**given, key: {name: entry for name, entry in given[key].items()
                                        if name in pieces or name not in self._trained.weights()}}
            _compare(own[key], given[key], f"state_dict[{key}]")
            for below in own[key]:
                there = own[key][below]
                if self._trained is not None and key == "model":
                    there = _state.without_lacking_buffers(self._trained, there, given[key][below])
                _compare(there, given[key][below], f"state_dict[{key}][{below}]")

    def _update_onnx_model_initializers(self, values: Mapping[str, TensorLike]) -> None:
        """Sets weights, frozen ones and buffers, by name."""
        if self._trained is not None and values:
            self._trained.load({name: as_tensor(value) for name, value in values.items()})

    def save_checkpoint(self, path: str, user_dict: Mapping[str, object] = {},  # noqa: B006
                        include_optimizer_states: bool = True) -> None:
        """Writes state_dict() to a file of HDF5, which must not be there yet; whole or not at all. With ZeRO every
        process writes its own file.

        Args:
            path: of the file.
            user_dict: is pickled, and comes back from load_checkpoint().
            include_optimizer_states: whether the optimizer's state is written.

        Raises:
            ImportError: h5py is not installed. FileExistsError: path is there.
        """
        state = dict(self.state_dict())
        if user_dict:
            state["user_dict"] = _checkpoint_storage.to_serialized_hex(user_dict)
        if not include_optimizer_states:
            state.pop("optimizer", None)
        _checkpoint_storage.save(state, path)

    def load_checkpoint(self, *paths: str, strict: bool = True) -> dict[str, Any]:
        """Loads what save_checkpoint() wrote. The user_dict in it is unpickled: load files that you trust.

        Args:
            paths: one file; with ZeRO those of all processes, which may have been more or fewer.
            strict: see load_state_dict().

        Returns:
            The user_dict; empty where there is none.

        Raises:
            AssertionError: the files are not those of one checkpoint.
            UnsupportedError: they are of parallel layers.
            ImportError: h5py is not installed.
        """
        from onnxtrain.training import checkpoint

        options = _checkpoint_storage.load(paths[0], key="trainer_options")
        if int(options.get("zero_stage", 0)) > 0 or int(options.get("horizontal_parallel_size", 1)) > 1:
            state = checkpoint.aggregate_checkpoints(paths, pytorch_format=False)
        else:
            check(len(paths) == 1, f"load_checkpoint: {len(paths)} files are given, but the first is a complete "
                  "checkpoint, without ZeRO: give it alone")
            state = _checkpoint_storage.load(paths[0])
        user_dict = _checkpoint_storage.from_serialized_hex(state["user_dict"]) if "user_dict" in state else {}
        self.load_state_dict(state, strict=strict)
        return user_dict


def _compare(own: Collection[str], given: Collection[str], where: str) -> None:
    missing, unexpected = [key for key in own if key not in given], [key for key in given if key not in own]
    problems = [f"{what}: {keys} in {where}" for what, keys in (("Missing keys", missing),
                                                                ("Unexpected keys", unexpected)) if keys]
    if problems:
        raise RuntimeError("; ".join(problems))


def sizes_of(described: Sequence[Described], inputs: Sequence[Any]) -> dict[str, int]:
    """What the names of sizes stand for in this call.

    Raises:
        AssertionError: one stands for two sizes, or an input has not as many dims.
    """
    sizes: dict[str, int] = {}
    for item, value in zip(described, inputs):
        for axis, name in enumerate(item[1]):
            if isinstance(name, str):
                check(axis < value.dim(), f"input {item[0]} has the shape {list(value.shape)}, but {item[1]} is "
                      "described")
                size = value.shape[axis]
                check(sizes.setdefault(name, size) == size, f"Mismatch in dynamic shape {name}")
    return sizes


def described_outputs(inputs: Sequence[Described], outputs: Sequence[Described], given: Sequence[object],
                      results: Sequence[Tensor], loss: int, with_loss_fn: bool,
                      fetches: Sequence[str] = ()) -> dict[str, Tensor]:
    """A model's results by name, in the shapes that are described.

    Args:
        inputs, outputs: descriptions.
        given: the inputs of this call; without the last of them a loss function gives no loss.
        results: in the order of the outputs; further ones are left out.
        loss: which output is the loss.
        with_loss_fn: whether it comes from a loss function.
        fetches: names of outputs; none means all. Other results are not read.

    Raises:
        RuntimeError: there are fewer results than are described, or one has another size.
        AssertionError: sizes of one name are not equal. KeyError: an output has a size that no input has.
    """
    described = list(outputs)
    if len(given) < len(inputs) and (with_loss_fn or len(results) == len(described) - 1):
        del described[loss]
    if len(results) < len(described):
        raise RuntimeError(f"the model has {len(results)} outputs, but {len(described)} are described")
    sizes = sizes_of(inputs, given)
    return {item[0]: _shaped(item, result.detach(), sizes) for item, result in zip(described, results)
            if not fetches or item[0] in fetches}


def _shaped(item: Described, result: Tensor, sizes: Mapping[str, int]) -> Tensor:
    """An output in the shape that is described for it."""
    shape = [sizes[size] if isinstance(size, str) else size for size in item[1]]
    if list(result.shape) == shape:
        return result
    try:
        return result.reshape(shape)
    except RuntimeError:
        raise RuntimeError(f"output {item[0]} has the shape {list(result.shape)}, but {shape} is described") from None
