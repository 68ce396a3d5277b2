"""Names under onnxruntime are the very objects of onnxtrain."""

import sys

import torch

import onnxtrain.compat.onnxruntime  # noqa: F401
from onnxtrain.ortmodule import ORTModule

NAMES = """
from onnxruntime.training import ortmodule, ORTModule
from onnxruntime.training.ortmodule import ORTModule, DebugOptions, LogLevel, _fallback, _utils, _io
from onnxruntime.training.ortmodule import register_graph_optimizer
from onnxruntime.training.ortmodule.experimental.pipe import ORTPipelineModule
from onnxruntime.training.utils.hooks.merge_activation_summary import main
from onnxruntime.training.utils.torch_profile_utils import log_memory_usage
from onnxruntime.training.ortmodule import ORTMODULE_FALLBACK_POLICY, ORTMODULE_TORCH_CPP_DIR
from onnxruntime.training.ortmodule import MINIMUM_RUNTIME_PYTORCH_VERSION_STR, ONNX_OPSET_VERSION
from onnxruntime.training.ortmodule._custom_gradient_registry import register_gradient
from onnxruntime.training.ortmodule._custom_autograd_function import enable_custom_autograd_support
from onnxruntime.training.ortmodule._fallback import _FallbackPolicy, ORTModuleDeviceException
from onnxruntime.training.ortmodule._graph_execution_manager_factory import GraphExecutionManagerFactory
from onnxruntime.training.ortmodule._onnx_models import _get_onnx_file_name
from onnxruntime.training.ortmodule.options import _SkipCheck
from onnxruntime.training.ortmodule.torch_cpp_extensions import is_installed
from onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule
from onnxruntime.training.ortmodule.experimental.json_config import load_from_json
from onnxruntime.training.utils import extract_data_and_schema, unflatten_data_using_schema, pytorch_type_to_onnx_dtype
from onnxruntime.training.utils.torch_io_helper import _TensorStub
from onnxruntime.training.utils.data import sampler
from onnxruntime.training.utils.data.sampler import LoadBalancingDistributedSampler
from onnxruntime.capi import _pybind_state as C
from onnxruntime import set_seed
from onnxruntime.capi.ort_trainer import ORTTrainer, IODescription, ModelDescription, LossScaler, generate_sample
from onnxruntime.capi.ort_trainer import load_checkpoint, save_checkpoint
from onnxruntime.training import ORTTrainer, ORTTrainerOptions, TrainStepInfo, PropagateCastOpsStrategy, _utils
from onnxruntime.training import amp, checkpoint, optim, orttrainer, orttrainer_options, _checkpoint_storage
from onnxruntime.training import model_desc_validation as md_val
from onnxruntime.training.amp.loss_scaler import DynamicLossScaler
from onnxruntime.training.optim import AdamConfig, FusedAdam, LambConfig, SGDConfig, fp16_optimizer, lr_scheduler
from onnxruntime.training.optim.config import _OptimizerConfig
from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer
from onnxruntime.training.optim.lr_scheduler import PolyWarmupLRScheduler
import onnxruntime.training.ortmodule as whole
import onnxruntime
"""


def test_names_are_the_same_objects():
    found = {}
    exec(NAMES, found)
    import onnxtrain.ortmodule as ours

    assert found["whole"] is ours and found["ORTModule"] is ORTModule and found["ortmodule"] is ours
    import onnxtrain.training

    assert found["ORTTrainer"] is onnxtrain.training.ORTTrainer and found["optim"] is onnxtrain.training.optim
    assert found["onnxruntime"].capi.ort_trainer.ORTTrainer is not found["ORTTrainer"]
    assert found["_FallbackPolicy"] is ours.FallbackPolicy and found["is_installed"]("anywhere")
    assert found["C"].PropagateCastOpsStrategy.FLOOD_FILL.name == "FLOOD_FILL"
    assert found["pytorch_type_to_onnx_dtype"](torch.float32) == 1
    onnxtrain.compat.onnxruntime.install()
    assert sys.modules["onnxruntime.training.ortmodule"] is ours
