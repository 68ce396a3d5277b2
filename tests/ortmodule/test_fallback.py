"""An operator that the engine does not have runs by torch between segments; the rest stays in the engine."""

import copy
import logging
import re

import onnx
import pytest
import torch
import torch.nn as nn
from onnxscript import opset18 as op

import onnxtrain
from onnxtrain import _C, UnsupportedError, export
from onnxtrain._export import autograd_functions
from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException, _fallback, _program, _runner


class Between(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.one, self.two, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.two(self.function(self.one(x), x).relu())


def both(function, steps=(3, 5)):
    torch.manual_seed(0)
    eager = Between(function)
    ours = ORTModule(copy.deepcopy(eager))
    for rows in steps:
        x = torch.randn(rows, 4)
        results = []
        for model in (eager, ours):
            model.zero_grad()
            given = x.clone().requires_grad_(True)
            out = model(given)
            out.square().sum().backward()
            results.append([out.detach(), given.grad, *(p.grad for p in model.parameters())])
        for a, b in zip(*results):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    return ours


def distances(h, x):
    return torch.cdist(h, x, p=3).sum(1, keepdim=True) * h


def test_what_the_exporter_cannot_translate_runs_by_torch():
    model = both(distances)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (2, 0, 1), counts["reasons"]
    text = onnxtrain.explain(model)
    assert "PyTorch runs 1 operator call (aten::_cdist_forward) between 2 parts of the graph" in text and "equal to eager" in text


def lack(monkeypatch, *operators):
    """An engine without some operators."""
    real = _C.Session

    def session(model, *args, **kwargs):
        import onnx

        for node in onnx.load_model_from_string(model).graph.node:
            if node.op_type in operators:
                raise UnsupportedError(f"operator ai.onnx.{node.op_type} (opset 20), used by node '{node.name}', is "
                                       "not supported")
        return real(model, *args, **kwargs)

    monkeypatch.setattr(_program._C, "Session", session)


def test_operators_that_the_engine_lacks_run_by_torch(monkeypatch):
    lack(monkeypatch, "Sin", "Atan")
    model = both(lambda h, x: torch.atan(h.sin() * x) + h.sin())
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 2 and counts["fallback_steps"] == 0, counts["reasons"]
    text = onnxtrain.explain(model)
    assert "aten::atan" in text and "aten::sin" in text


def test_a_graph_with_dropout_is_compared_without_and_run_with_it():
    torch.manual_seed(0)
    module = Between(lambda h, x: nn.functional.dropout(distances(h, x).abs() + 1, 0.3))
    model, x = ORTModule(module), torch.randn(16, 4)
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        model(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states), "neither the export nor the comparison may draw from the user's generator"
    assert onnxtrain.stats(model)["engine_steps"] == 2 and "equal to eager" in onnxtrain.explain(model)


def test_random_operators_run_by_torch_draw_from_its_generator(monkeypatch):
    lack(monkeypatch, "Bernoulli", "RandomUniformLike", "RandomUniform")
    module = Between(lambda h, x: h * torch.bernoulli(torch.full_like(h, 0.5)))
    model, x = ORTModule(module), torch.randn(16, 4)
    model(x)
    torch.manual_seed(1)
    ours = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(ours, module(x))
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 2 and counts["fallback_steps"] == 0


def test_an_operator_whose_gradient_is_lost_is_refused_and_the_module_runs_in_pytorch(monkeypatch, caplog):
    call = autograd_functions.OperatorCall.__call__
    monkeypatch.setattr(autograd_functions.OperatorCall, "__call__",
                        lambda self, tensors: [t.detach() for t in call(self, tensors)])
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        model = both(distances)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 0 and counts["fallback_steps"] == 2
    assert "graph is wrong" in counts["reasons"][0] and caplog.text.count("runs in PyTorch") == 1
    assert counts["reasons"][0] in onnxtrain.stats()["reasons"]


@pytest.mark.parametrize("policy", ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA|FALLBACK_UNSUPPORTED_DEVICE"])
def test_a_policy_that_forbids_it_raises(policy, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
    with pytest.raises(ORTModuleTorchModelException, match="_cdist_forward"):
        ORTModule(Between(distances))(torch.randn(3, 4))
    lack(monkeypatch, "Sin")
    with pytest.raises(_fallback.ORTModuleONNXModelException, match="ai.onnx.Sin"):
        ORTModule(Between(lambda h, x: h.sin()))(torch.randn(3, 4))


def test_an_operator_that_is_missing_is_named_once(monkeypatch, caplog):
    lack(monkeypatch, "Sin")
    monkeypatch.setattr(_runner, "MAX_BY_TORCH", 0)
    model, x = ORTModule(Between(lambda h, x: h.sin())), torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(3):
            torch.testing.assert_close(model(x), model.module(x))
    (said,) = [record.getMessage() for record in caplog.records if "runs in PyTorch" in record.getMessage()]
    assert re.search(r"operator ai\.onnx\.Sin \(opset 20\), used by node '[^']*sin', is not supported", said), said
    counts = onnxtrain.stats(model)
    assert counts["exports"] == 1 and counts["fallback_steps"] == 3 and counts["engine_steps"] == 0
    model(x).sum().backward()
    assert model.one.weight.grad is not None


def test_a_forced_fallback_is_kept_as_the_reason(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    model = ORTModule(nn.Linear(2, 2))
    fallback = model._torch_module._execution_manager(True)._fallback_manager
    assert fallback._exception is None
    model(torch.ones(1, 2))
    assert "FORCE_TORCH_FORWARD" in str(fallback._exception) and onnxtrain.stats(model)["fallback_steps"] == 1


def test_pytorch_runs_a_graph_that_does_not_run(monkeypatch):
    """A translation whose graph has operands of two dtypes."""
    monkeypatch.setattr(export, "translations", lambda opset, ours=export.translations: ours(opset) | {
        torch.ops.aten.tanh.default: lambda self: op.Add(self, op.Cast(self, to=onnx.TensorProto.BFLOAT16))})

    class Tanh(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.fc(x))

    torch.manual_seed(0)
    eager, given = Tanh(), torch.randn(3, 4)
    ours = ORTModule(copy.deepcopy(eager))
    for model in (eager, ours):
        model(given).square().sum().backward()
    for a, b in zip(ours.parameters(), eager.parameters()):
        torch.testing.assert_close(a.grad, b.grad)
    counts = onnxtrain.stats(ours)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (0, 1)
    assert "is float and input 'val_0' is bfloat16" in counts["reasons"][0]


@pytest.mark.parametrize("use", [
    lambda h, x: h + torch.linalg.eigvals(x[:3, :3]).abs().sum(),
    lambda h, x: h + h[:2].as_strided((3, 4), (4, 1), 0).sum(),
    lambda h, x: h + torch.gcd(x.long(), x.long())], ids=["complex", "memory", "no translation"])
def test_what_no_graph_has_is_named_with_the_users_line(use):
    (reason,) = onnxtrain.stats(both(use, steps=(5,)))["reasons"]
    assert f"in {__file__}, line " in reason and "lambda h, x: h + " in reason
