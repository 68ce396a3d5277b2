"""What scripts and test suites read of ORTModule's inside, under the names that they know: views of the real objects.

`model._torch_module._execution_manager(is_training)` leads here. Nothing is kept here but what a script sets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import torch

from onnxtrain import UnsupportedError
from onnxtrain.ortmodule._debug import in_opset

if TYPE_CHECKING:
    from onnxtrain.ortmodule._module import ORTModule
    from onnxtrain.ortmodule._program import Agent, Program


class ModelInfo:
    """One export: the model, the names of its inputs, and the schema of the call that it was made for."""

    def __init__(self, program: Program, opset: int) -> None:
        exported = program.exported
        self._program = program
        # As torch made it, weights as inputs.
        self.exported_model = onnx.load_from_string(in_opset(exported.model, opset))
        self.onnx_graph_input_names = [i.name for i in exported.inputs if i.kind in ("user", "buffer")]
        self.module_forward_args_schema = program.called_with  # of the arguments by position and by name
        self.module_forward_kwargs_schema = None

    @property
    def onnx_graph_input_names_require_grad(self) -> list[str]:
        """Those of the user's tensors that wanted a gradient in the latest step."""
        return self._program.wanting("user")


_SET_HERE = frozenset((  # arguments of torch.onnx.export that an export of ours decides about
    "args", "custom_translation_table", "do_constant_folding", "dynamic_axes", "dynamic_shapes", "dynamo",
    "export_params", "f", "input_names", "keep_initializers_as_inputs", "kwargs", "model", "opset_version", "optimize",
    "output_names", "training", "verbose"))


class GraphTransitionManager:
    """The exports of one mode."""

    def __init__(self, manager: GraphExecutionManager) -> None:
        self._manager = manager
        self._export_extra_kwargs: dict[str, object] = {}

    def check_extra_kwargs(self) -> None:
        """Raises UnsupportedError where a script has set arguments for the exporter that are not its to set."""
        refused = self._export_extra_kwargs.keys() & _SET_HERE
        if refused:
            raise UnsupportedError(f"The following PyTorch exporter arguments cannot be specified: '{refused}'.")

    @property
    def _exported_model_info(self) -> ModelInfo | None:
        found = self._manager._latest()
        return None if found is None else ModelInfo(found[1], self._manager._runtime_options.onnx_opset_version)

    _model_info_for_export = _post_export_processed_model_info = _exported_model_info

    _original_model_has_changed = False  # Dynamo's guards see a change at the next call


class OnnxModels:
    """The graphs of the program used last in one mode."""

    def __init__(self, manager: GraphExecutionManager) -> None:
        self._manager = manager

    def _stage(self, stage: str) -> onnx.ModelProto | None:
        found = self._manager._latest()
        opset = self._manager._runtime_options.onnx_opset_version
        return None if found is None else onnx.load_from_string(in_opset(found[1].save(stage), opset))

    exported_model = property(lambda self: getattr(
        self._manager._graph_transition_manager._exported_model_info, "exported_model", None))
    processed_model = property(lambda self: self._stage("post_processed"))
    optimized_pre_grad_model = property(lambda self: self._stage("optimized_pre_grad"))
    optimized_model = property(lambda self: self._stage("optimized"))  # with its backward part


class GraphExecutionManager:
    """One mode of an ORTModule."""

    def __init__(self, model: ORTModule, training: bool) -> None:
        self._model, self._training = model, training
        self._export_mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
        self._graph_transition_manager = GraphTransitionManager(self)
        self._onnx_models = OnnxModels(self)

    def _latest(self) -> tuple[object, Program] | None:
        """The program used last: those of this mode, and of no gradient but in train(), which count as inference."""
        found = [(key, program) for key, known in self._model._all_programs() for program in known
                 if key.training == self._training]
        return max(found, key=lambda pair: pair[1].used, default=None)

    _runtime_options = property(lambda self: self._model._runtime)
    _debug_options = property(lambda self: self._model._debug)
    _fallback_manager = property(lambda self: self._model._fallback)

    @property
    def _device(self) -> torch.device | None:
        """Where the module's tensors are."""
        module = self._model.module
        tensor = next(iter([*module.parameters(), *module.buffers()]), None)
        return None if tensor is None else tensor.device

    @property
    def _execution_agent(self) -> Agent | None:
        """What runs: a new object for each export and each set of gradients."""
        found = self._latest()
        return None if found is None else found[1].agent

    _graph_builder = _execution_agent


class GraphExecutionManagerFactory:
    """The two modes: a call with a bool gives one."""

    def __init__(self, model: ORTModule) -> None:
        self._training_manager = GraphExecutionManager(model, True)
        self._inference_manager = GraphExecutionManager(model, False)

    def __call__(self, is_training: bool) -> GraphExecutionManager:
        return self._training_manager if is_training else self._inference_manager


class TorchModule:
    """Holds the two modes."""

    def __init__(self, model: ORTModule) -> None:
        self._model = model
        self._execution_manager = GraphExecutionManagerFactory(model)
        self._flattened_module = model.module

    @property
    def module(self) -> torch.nn.Module:
        return self._model.module

    def is_training(self) -> bool:
        """Whether the next call builds or uses a program for training."""
        return self._model.module.training and torch.is_grad_enabled()


class View:
    """ORTModule._torch_module: views of the inside under the names that scripts know."""

    def __get__(self, model: ORTModule | None, _owner: type) -> Any:
        if model is None:
            return self
        view = model.__dict__.get("_view")
        if view is None:
            view = model.__dict__["_view"] = TorchModule(model)
        return view


def _get_onnx_file_name(name_prefix: str, name: str, export_mode: torch.onnx.TrainingMode) -> str:
    """`{prefix}_{name}_{training|inference}.onnx`, as DebugOptions(save_onnx=True) writes it."""
    return f"{name_prefix}_{name}_{'training' if export_mode == torch.onnx.TrainingMode.TRAINING else 'inference'}.onnx"
