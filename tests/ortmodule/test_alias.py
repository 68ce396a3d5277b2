"""Import lines and fragments of the documents of onnxruntime-training, as they are written there.

Each runs in a process that has nothing of onnxtrain but the alias.
"""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import onnxtrain.compat.onnxruntime
from onnxtrain.compat import _alias

IMPORTS = """
import onnxruntime.training.pytorch as ort
from onnxruntime.training import pytorch as ort
import onnxruntime as ort
from onnxruntime import GraphOptimizationLevel, SessionOptions, set_seed
from onnxruntime.training import ORTModule, ORTTrainer, ORTTrainerOptions, TrainStepInfo, PropagateCastOpsStrategy
from onnxruntime.training import _checkpoint_storage, _utils, amp, checkpoint, model_desc_validation, optim
from onnxruntime.training import ortmodule, orttrainer, orttrainer_options
from onnxruntime.training.amp import DynamicLossScaler, LossScaler
from onnxruntime.training.amp.loss_scaler import DynamicLossScaler, LossScaler
from onnxruntime.training.checkpoint import aggregate_checkpoints, experimental_load_checkpoint
from onnxruntime.training.checkpoint import experimental_load_state_dict, experimental_save_checkpoint
from onnxruntime.training.checkpoint import experimental_state_dict
from onnxruntime.training.model_desc_validation import ALL_FINITE_IO_DESCRIPTION_NAME, _ORTTrainerModelDesc
from onnxruntime.training.model_desc_validation import GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME
from onnxruntime.training.model_desc_validation import LEARNING_RATE_IO_DESCRIPTION_NAME
from onnxruntime.training.model_desc_validation import LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME
from onnxruntime.training.optim import AdamConfig, LambConfig, SGDConfig, _LRScheduler, _OptimizerConfig
from onnxruntime.training.optim import ConstantWarmupLRScheduler, CosineWarmupLRScheduler
from onnxruntime.training.optim import LinearWarmupLRScheduler, PolyWarmupLRScheduler
from onnxruntime.training.optim import AdamWMode, FP16_Optimizer, FusedAdam
from onnxruntime.training.optim import config, fp16_optimizer, fused_adam, lr_scheduler
from onnxruntime.training.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer
from onnxruntime.training.optim.fused_adam import AdamWMode, FusedAdam
from onnxruntime.training.optim.lr_scheduler import ConstantWarmupLRScheduler, CosineWarmupLRScheduler, _LRScheduler
from onnxruntime.training.optim.lr_scheduler import LinearWarmupLRScheduler, PolyWarmupLRScheduler
from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule, register_graph_optimizer
from onnxruntime.training.ortmodule import _fallback, _io, _onnx_models, _utils
from onnxruntime.training.ortmodule._custom_autograd_function import enable_custom_autograd_support
from onnxruntime.training.ortmodule._custom_gradient_registry import register_gradient
from onnxruntime.training.ortmodule._fallback import _FallbackPolicy, ORTModuleTorchModelException
from onnxruntime.training.ortmodule._graph_execution_manager_factory import GraphExecutionManagerFactory
from onnxruntime.training.ortmodule._io import _TensorStub, unflatten_data_using_schema
from onnxruntime.training.ortmodule._onnx_models import _get_onnx_file_name
from onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule
from onnxruntime.training.ortmodule.experimental.json_config import load_from_json
from onnxruntime.training.ortmodule.experimental.pipe import ORTPipelineModule
from onnxruntime.training.ortmodule.graph_optimizer_registry import register_graph_optimizer
from onnxruntime.training.ortmodule.options import _SkipCheck
from onnxruntime.training.ortmodule.torch_cpp_extensions import install, is_installed
from onnxruntime.training.orttrainer import ORTTrainer, TrainStepInfo
from onnxruntime.training.orttrainer_options import ORTTrainerOptions
from onnxruntime.training.utils import extract_data_and_schema, torch_io_helper, unflatten_data_using_schema
from onnxruntime.training.utils.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from onnxruntime.training.utils.data.sampler import LoadBalancingDistributedSampler
from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
from onnxruntime.training.utils.torch_io_helper import _TensorStub
from onnxruntime.capi import _pybind_state as C
from onnxruntime.capi._pybind_state import ArenaExtendStrategy, set_arena_extend_strategy
from onnxruntime.capi._pybind_state import get_mpi_context_local_rank, get_mpi_context_local_size
from onnxruntime.capi._pybind_state import get_mpi_context_world_rank, get_mpi_context_world_size
from onnxruntime.capi._pybind_state import set_cuda_device_id, set_cuda_mem_limit
from onnxruntime.capi.ort_trainer import IODescription, LossScaler, ModelDescription, ORTTrainer
from onnxruntime.capi.ort_trainer import generate_sample, load_checkpoint, save_checkpoint
from onnxruntime.training import *
"""
NOT_HERE = """
from onnxruntime.training import TrainingParameters
from onnxruntime.training import TrainingSession
from onnxruntime import TrainingSession
from onnxruntime.training import artifacts
import onnxruntime.training.onnxblock
import onnxruntime.training.ortmodule.experimental.nothing
import onnxruntime.training.ortmodule._io.nothing
from onnxruntime.training.experimental import export_gradient_graph
from onnxruntime.training import postprocess
from onnxruntime import InferenceSession
"""
START = """
import copy, sys, torch
import torch.nn as nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))

def loss_fn(output, label):
    return nn.functional.cross_entropy(output, label)

def eager_losses(model, optimizer, steps):
    losses = []
    for x, y in steps:
        optimizer.zero_grad()
        losses.append(loss_fn(model(x), y))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses)

torch.manual_seed(0)
model = Net()
plain = copy.deepcopy(model)
criterion = nn.CrossEntropyLoss()
batches = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(4)]
"""
END = """
torch.testing.assert_close(torch.stack(losses), eager_losses(plain, eager, batches).detach())
for ours, theirs in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(ours, theirs)
"""
FRAGMENTS = {
    "pytorch": """
import onnxruntime.training.pytorch as ort

optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = ort.trainer(model, criterion, optimizer)
losses = []
for x, y in batches:
    loss, y = trainer.step(x, y)
    losses.append(loss)
eager = torch.optim.Adam(plain.parameters(), lr=0.01)
""" + END,
    "ort.trainer": """
import onnxruntime as ort

trainer = ort.trainer(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))
losses = []
for x, y in batches:
    loss, prediction = trainer.step(x, y)
    losses.append(loss)
eager = torch.optim.SGD(plain.parameters(), lr=0.1)
""" + END,
    "ORTModule": """
from onnxruntime.training.optim import FP16_Optimizer, FusedAdam
from onnxruntime.training.ortmodule import ORTModule, DebugOptions, LogLevel

model = ORTModule(model, DebugOptions(log_level=LogLevel.WARNING))
optimizer = FusedAdam(model.parameters(), lr=0.01, weight_decay=0.0, eps=1e-8)
assert FP16_Optimizer(optimizer) is optimizer
losses = []
for x, y in batches:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
eager = torch.optim.Adam(plain.parameters(), lr=0.01)
""" + END,
    "ORTTrainer": """
from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim

model_desc = {"inputs": [("x", ["batch", 8]), ("label", ["batch"])],
              "outputs": [("loss", [], True), ("scores", ["batch", 4])]}
trainer = ORTTrainer(model, model_desc, optim.SGDConfig(lr=0.1), loss_fn, ORTTrainerOptions({"device": {"id": "cpu"}}))
losses = [trainer.train_step(x, y)[0] for x, y in batches]
assert trainer.eval_step(*batches[0])[0].shape == ()
eager = torch.optim.SGD(plain.parameters(), lr=0.1)
""" + END,
    "ort_trainer": """
from onnxruntime.capi.ort_trainer import IODescription, ModelDescription, ORTTrainer

input_desc = IODescription("x", ["batch", 8], torch.float32)
label_desc = IODescription("label", ["batch"], torch.int64, num_classes=4)
loss_desc = IODescription("loss", [], torch.float32)
output_desc = IODescription("output", ["batch", 4], torch.float32)
model_description = ModelDescription([input_desc, label_desc], [loss_desc, output_desc])
trainer = ORTTrainer(model, loss_fn, model_description, "SGDOptimizer", None,
                     IODescription("Learning_Rate", [1], torch.float32), torch.device("cpu"),
                     gradient_accumulation_steps=1, world_rank=0, world_size=1, use_mixed_precision=False,
                     allreduce_post_accumulation=True, deepspeed_zero_stage=0, _opset_version=12)
losses = [trainer.train_step(x, y, torch.tensor([0.1]))[0] for x, y in batches]
eager = torch.optim.SGD(plain.parameters(), lr=0.1)
""" + END,
}
WALK = """
import sys, traceback
wrong = []
for line in {lines!r}.strip().splitlines():
    try:
        exec(line, {{}})
    except Exception as error:
        wrong.append((line, type(error).__name__, str(error)))
assert not [name for name in sys.modules if name == "onnxtrain.ortmodule._io"]
print(wrong)
"""


def run(script, tmp_path):
    """What a script prints that is run by `python -m onnxtrain run`."""
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "-m", "onnxtrain", "run", "script.py"], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_import_line(tmp_path):
    assert run(WALK.format(lines=IMPORTS), tmp_path).strip() == "[]"


def test_what_is_not_here_is_an_import_error(tmp_path):
    wrong = eval(run(WALK.format(lines=NOT_HERE), tmp_path))
    lines = NOT_HERE.strip().splitlines()
    assert [line for line, _, _ in wrong] == lines
    for line, kind, message in wrong:
        assert kind in ("ImportError", "ModuleNotFoundError") and "onnxruntime" in message, (line, kind, message)


def test_fragments(tmp_path):
    """All in one process, each with a fresh model; the losses and weights are eager PyTorch's."""
    script = "".join(f"\n{START}\n{code}\nprint({name!r})\n" for name, code in FRAGMENTS.items())
    assert run(script, tmp_path).split() == list(FRAGMENTS)


def test_no_module_is_there_twice():
    """Each module of ours below a name of the alias is the same object under both names."""
    walked = []
    for theirs, here in _alias.OURS:
        path = getattr(importlib.import_module(here), "__path__", ())
        for found in pkgutil.walk_packages(path, f"{here}."):
            if "__main__" not in found.name:
                walked.append(theirs + found.name.removeprefix(here))
    assert len(walked) > 70
    for name in walked:
        assert importlib.import_module(name) is importlib.import_module(_alias.ours(name)), name
    files = {}
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) and "/onnxtrain/" in module.__file__:
            files.setdefault(module.__file__, set()).add(id(module))
    assert not [file for file, modules in files.items() if len(modules) > 1]


@pytest.mark.parametrize("module, here", [(module, here) for module, sources in _alias.FILLED.items()
                                          for here, names in sources.items() if names.split()[1:]])
def test_names_that_are_added_are_those_of_the_module(module, here):
    names = set(_alias.FILLED[module][here].split())
    assert names == set(importlib.import_module(here).__all__) - {"install"}


def test_attributes_and_dunder_names():
    """Python's own tools ask every module for such names: nothing of ours is loaded for that."""
    import onnxruntime

    assert onnxruntime.capi.ort_trainer is importlib.import_module("onnxtrain.training.legacy")
    assert onnxruntime.training.ortmodule is importlib.import_module("onnxtrain.ortmodule")
    assert not any(hasattr(module, name) for name in ("__file__", "__wrapped__", "__path_of__")
                   for module in (onnxruntime, onnxruntime.training, onnxruntime.capi))
    with pytest.raises(AttributeError, match="'InferenceSession': it is onnxtrain's alias"):
        _ = onnxruntime.InferenceSession
    onnxtrain.compat.onnxruntime.install()  # other libraries may have put a finder in front
    before = list(sys.meta_path)
    onnxtrain.compat.onnxruntime.install()
    assert sys.meta_path == before and sys.meta_path[0] is _alias.Finder
