"""What scripts read and set of ORTModule's inside shows and changes the real objects."""

import onnx
import pytest
import torch
import torch.nn as nn

from onnxtrain.ortmodule import DebugOptions, ORTModule


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
