"""What older scripts ask of `onnxruntime.training` beside its names: variables, JSON, hierarchies, opsets."""

import copy
import json

import onnx
import pytest
import torch
import torch.nn as nn

import onnxtrain.compat.onnxruntime
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule
from onnxtrain.ortmodule.experimental.pipe import ORTPipelineModule


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
