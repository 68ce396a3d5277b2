"""`onnxruntime.training` as an alias, what scripts read of the inside, and `python -m onnxtrain run`."""

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn as nn

import onnxtrain.compat.onnxruntime
from onnxtrain.ortmodule import DebugOptions, ORTModule
from onnxtrain.ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule
from onnxtrain.ortmodule.experimental.pipe import ORTPipelineModule

ROOT = Path(__file__).resolve().parents[2]
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


def test_a_variable_of_the_environment_has_the_type_of_its_default(monkeypatch):
    from onnxruntime.training import ortmodule

    assert ortmodule._defined_from_envvar("ORTMODULE_OF_A_TEST", 3) == 3
    monkeypatch.setenv("ORTMODULE_OF_A_TEST", "15")
    assert ortmodule._defined_from_envvar("ORTMODULE_OF_A_TEST", 3) == 15
    assert ortmodule._defined_from_envvar("ORTMODULE_OF_A_TEST", "3") == "15"
    monkeypatch.setenv("ORTMODULE_OF_A_TEST", "many")
    with pytest.warns(UserWarning, match="Unable to overwrite constant 'ORTMODULE_OF_A_TEST' with value 'many'"):
        assert ortmodule._defined_from_envvar("ORTMODULE_OF_A_TEST", 3) == 3
    assert ortmodule._are_deterministic_algorithms_enabled() == torch.are_deterministic_algorithms_enabled()


def test_pipelines_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="ORTPipelineModule, .* is not supported"):
        ORTPipelineModule([nn.Linear(2, 2)], num_stages=1)


def test_helpers_of_samples(monkeypatch, caplog):
    """Without a launcher, by torchrun's environment, by mpirun's; what concerns a GPU changes nothing without one."""
    from onnxruntime.capi._pybind_state import (
        ArenaExtendStrategy,
        get_mpi_context_local_rank,
        get_mpi_context_local_size,
        get_mpi_context_world_rank,
        get_mpi_context_world_size,
        set_arena_extend_strategy,
        set_cuda_device_id,
        set_cuda_mem_limit,
        set_seed,
    )

    def told():
        return (get_mpi_context_world_rank(), get_mpi_context_world_size(), get_mpi_context_local_rank(),
                get_mpi_context_local_size())

    torchrun = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    mpirun = {"OMPI_COMM_WORLD_RANK": 2, "OMPI_COMM_WORLD_SIZE": 6, "OMPI_COMM_WORLD_LOCAL_RANK": 0,
              "OMPI_COMM_WORLD_LOCAL_SIZE": 3}
    for name in (*torchrun, *mpirun):
        monkeypatch.delenv(name, raising=False)
    assert told() == (0, 1, 0, 1)
    for name, value in mpirun.items():
        monkeypatch.setenv(name, str(value))
    assert told() == (2, 6, 0, 3)
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    assert told() == (5, 8, 1, 4)
    set_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(1))
    set_arena_extend_strategy(ArenaExtendStrategy.kSameAsRequested)
    assert "no effect" in caplog.text
    from onnxruntime import SessionOptions
    from onnxruntime.training import ORTTrainerOptions

    session = SessionOptions()
    session.enable_mem_pattern = False
    assert ORTTrainerOptions({"session_options": session}).session_options.enable_mem_pattern is False
    if not torch.cuda.is_available():
        set_cuda_device_id(0)
        set_cuda_mem_limit(int(32e9))


SCRIPT = """
import sys
import helper
from onnxruntime.training.ortmodule import ORTModule
import onnxruntime
if __name__ == "__main__":
    onnxruntime.set_seed(3)
    import torch
    first = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(1))
    print(helper.NAME, sys.argv[1:], ORTModule.__module__.split(".")[0])
"""


def run(*arguments, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "onnxtrain", *arguments], cwd=cwd, capture_output=True, text=True)


def test_a_script_runs_unedited(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("NAME = 'beside'\n")
    done = run("run", str(tmp_path / "train.py"), "--epochs", "2")
    assert done.stdout.strip() == "beside ['--epochs', '2'] onnxtrain", done.stderr
    for arguments in (("run",), ("walk",)):
        done = run(*arguments)
        assert done.returncode == 2 and done.stderr.startswith("usage:")


def test_views_of_the_inside():
    model = ORTModule(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    training, inference = (model._torch_module._execution_manager(mode) for mode in (True, False))
    assert training._graph_transition_manager._exported_model_info is None and training._execution_agent is None
    assert model._torch_module._execution_manager._training_manager is training
    x = torch.randn(2, 3)
    model(x).sum().backward()
    first = training._execution_agent
    assert inference._onnx_models.optimized_model is None
    model(x)
    assert training._execution_agent is first and first._inference_session is not None
    model(x.clone().requires_grad_(True))
    info = training._graph_transition_manager._model_info_for_export
    assert training._execution_agent is not first and info.onnx_graph_input_names_require_grad == ["input"]
    model.eval()
    with torch.no_grad():
        model(x)
    kinds = [{n.op_type for n in m._onnx_models.optimized_model.graph.node} for m in (training, inference)]
    assert any("Grad" in kind for kind in kinds[0]) and not any("Grad" in kind for kind in kinds[1])
    assert training._onnx_models.exported_model.graph.input[0].name == "input"
    assert training._device.type == "cpu" and not model._is_training()


def test_json_config(tmp_path):
    from onnxtrain.ortmodule.experimental.json_config import load_from_json

    path = tmp_path / "c.json"
    path.write_text(json.dumps({
        "PropagateCastOps": {"Strategy": "FLOOD_FILL", "Level": 3, "Allow": ["A"]}, "UseStaticShape": True,
        "EnableCustomAutogradFunction": False, "SkipCheck": ["SKIP_CHECK_DEVICE", "SKIP_CHECK_EXECUTION_AGENT"],
        "DebugOptions": {"LogLevel": "ERROR"}, "FallbackPolicy": ["FALLBACK_DISABLE"], "OnnxOpsetVersion": 18,
    }))
    model = ORTModule(nn.Linear(3, 3))
    load_from_json(model, str(path))
    manager = model._torch_module._execution_manager(True)
    options = manager._runtime_options
    assert (options.propagate_cast_ops_level, options.use_static_shape, options.skip_check.value) == (3, True, 10)
    assert manager._debug_options.logging.log_level.name == "ERROR" and manager._fallback_manager.policy.value == 1
    model(torch.ones(1, 3))
    assert model._all_programs()[0][1][0].exported.opset == 18
    for content, error in (({"Unknown": 1}, ValueError), ({"UseStaticShape": 1}, TypeError),
                           ({"SkipCheck": ["X"]}, KeyError)):
        path.write_text(json.dumps(content))
        with pytest.raises(error):
            load_from_json(model, str(path))
    with pytest.raises(ValueError, match="ORTMODULE_JSON_CONFIG_PATH"):
        load_from_json(model)


def test_random_states_and_devices():
    from onnxtrain.ortmodule import _utils

    states = _utils.get_random_states()
    first = random.random(), np.random.rand(), torch.rand(1)
    _utils.set_random_states(states)
    assert (random.random(), np.random.rand(), torch.rand(1)) == first
    assert _utils.get_device_str("cpu") == _utils.get_device_str(torch.device("cpu")) == "cpu"
    assert _utils.get_device_str("cuda:1") == "cuda:1" and _utils.get_device_index("cuda:1") == 1


def test_nested_data_and_back():
    from onnxtrain.utils import extract_data_and_schema, unflatten_data_using_schema

    data = {"a": [torch.ones(2), 1, None], "b": (2.5, {"c": torch.zeros(3, dtype=torch.int64)}, "s", True)}
    tensors, schema = extract_data_and_schema(data)
    assert ([t.shape for t in tensors] == [(2,), (3,)] and schema["a"][0].name == "a_0"
            and schema["b"][1]["c"].shape_dims == 1)
    back = unflatten_data_using_schema(tensors, schema)
    assert back["b"][0] == 2.5 and back["b"][1]["c"] is data["b"][1]["c"] and back["a"][1:] == [1, None]
    tensors, schema = extract_data_and_schema(data, constant_as_tensor=True)
    assert len(tensors) == 5 and unflatten_data_using_schema(tensors, schema)["b"][3].item() is True
    with pytest.raises(TypeError, match="Unsupported flatten data type"):
        extract_data_and_schema(object())


class Partly(nn.Module):
    """The middle branches on a value, so that only its neighbours run in the engine."""

    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x) if x.sum() > 0 else -self.inner(x)

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), self.Middle(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def test_hierarchical_runs_every_part():
    """It is ORTModule, for which Dynamo cuts the graph at the branch."""
    torch.manual_seed(0)
    plain = Partly()
    model = HierarchicalORTModule(copy.deepcopy(plain))
    x = torch.randn(3, 4)
    for scale in (1, -1, 1):
        loss, expected = model(scale * x).square().sum(), plain(scale * x).square().sum()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    found = onnxtrain.stats(model)
    assert (found["engine_steps"], found["fallback_steps"]) == (3, 0) and found["graph_breaks"]


def test_arguments_of_the_exporter_that_are_not_a_scripts_are_refused(monkeypatch):
    from onnxtrain.ortmodule._fallback import ORTModuleONNXModelException

    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    model = ORTModule(nn.Linear(2, 2))
    manager = model._torch_module._execution_manager(True)._graph_transition_manager
    manager._export_extra_kwargs = {"custom_opsets": None}
    model(torch.ones(1, 2))
    manager._export_extra_kwargs = {"verbose": False}
    with pytest.raises(ORTModuleONNXModelException, match="exporter arguments cannot be specified: '{'verbose'}'."):
        model(torch.ones(2))


def test_a_script_may_set_the_opset(monkeypatch, caplog):
    import onnxtrain.ortmodule as ours

    monkeypatch.setattr(ours, "ONNX_OPSET_VERSION", 19)
    model = ORTModule(nn.Linear(2, 2))
    model(torch.ones(1, 2))
    manager = model._torch_module._execution_manager(True)._graph_transition_manager
    exported = manager._exported_model_info.exported_model
    assert exported.opset_import[0].version == 19 and model._torch_module._flattened_module.training
    assert "was requested" not in caplog.text
    monkeypatch.setattr(ours, "ONNX_OPSET_VERSION", 9)
    ORTModule(nn.Linear(2, 2))(torch.ones(1, 2))
    assert "Linear: opset 9 was requested, and 18 is used" in caplog.text


class Sampled(nn.Module):
    def forward(self, x):
        return nn.functional.grid_sample(x, x.new_zeros(1, 2, 2, 2), align_corners=False)


def test_what_is_seen_and_saved_has_the_older_opset_that_is_asked_for(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "13")
    model = ORTModule(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Sigmoid(), nn.Dropout(0.1)),
                      DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path)))
    model(torch.ones(2, 3)).sum().backward()
    seen = model._torch_module._execution_manager(True)._onnx_models
    saved = [onnx.load(path) for path in tmp_path.iterdir()]
    assert len(saved) == 5
    for graph in (seen.exported_model, seen.optimized_model, *saved):
        assert {o.domain: o.version for o in graph.opset_import}[""] == 13
        onnx.checker.check_model(graph)
    ORTModule(Sampled(), DebugOptions(save_onnx=True, onnx_prefix="none", save_path=str(tmp_path)))(torch.ones(1, 1, 3, 3))
    assert "none_torch_exported keeps its opset: opset 13 of ONNX has no form of GridSample" in caplog.text
    assert onnx.load(tmp_path / "none_torch_exported_training.onnx").opset_import[0].version == 18


class _Several(nn.Module):
    """Operators whose form differs between opsets: axes of reductions are an input from 18 on."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)

    def forward(self, x):
        first, second = self.norm(self.fc(x)).split([3, 5], dim=1)
        h = torch.cat([first.sum(1, keepdim=True), second.softmax(1), first.clamp(-1, 1)], dim=1)
        return h.unsqueeze(1).squeeze(1).mean(), h.argmax(1)


@pytest.mark.parametrize("opset", range(18, 23))
def test_every_opset(opset, monkeypatch, caplog):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", str(opset))
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    torch.manual_seed(0)
    plain = _Several()
    model = ORTModule(copy.deepcopy(plain))
    for rows in (5, 5, 3):
        x = torch.randn(rows, 6)
        expected, best = plain(x)
        found, at = model(x)
        expected.backward()
        found.backward()
        torch.testing.assert_close(found, expected)
        assert torch.equal(best, at)
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    manager = model._torch_module._execution_manager(True)
    exported = manager._onnx_models.exported_model
    assert exported.opset_import[0].version == opset and "Split" in {node.op_type for node in exported.graph.node}
    onnx.checker.check_model(exported)
    assert onnxtrain.stats(model)["fallback_steps"] == 0 and "was requested" not in caplog.text
