"""The second exporter: taken where the default one fails, refused where its results are not eager's."""

import copy
import logging

import pytest
import torch
import torch.nn as nn

import onnxtrain
import onnxtrain.export
from onnxtrain._export import rewrite
from onnxtrain.export import ExportError
from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException


class Counted(nn.Module):
    """With a state, and dropout; inner: with a factor that no gradient goes through."""

    def __init__(self, inner=False):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.inner = inner

    def forward(self, x):
        y = self.drop(self.norm(self.fc(x))) * 6
        return y * y.detach() if self.inner else y


@pytest.fixture
def no_default(monkeypatch):
    """The default exporter refuses everything."""
    def refuse(*_args):
        raise ExportError("refused for the test")

    monkeypatch.setattr(onnxtrain.export, "_dynamo", refuse)


def test_torchscript_takes_what_the_default_exporter_refuses(no_default, caplog):
    torch.manual_seed(0)
    module = Counted()
    module.drop.p = 0.0
    eager, model = copy.deepcopy(module), ORTModule(module)
    for step in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        a, b = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
        with caplog.at_level(logging.WARNING, "onnxtrain"):
            ours = model(a)
        expected = eager(b)
        torch.testing.assert_close(ours, expected)
        ours.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(eager.named_parameters(), module.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=2e-3, msg=name)
    for (name, p), q in zip(eager.named_buffers(), module.buffers()):
        torch.testing.assert_close(q, p, msg=name)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 3 and counts["fallback_steps"] == 0
    assert "exported with the torchscript exporter, because" in caplog.text
    assert "exporter torchscript" in onnxtrain.explain(model)


def test_torchscript_with_dropout_is_compared_without_and_run_with_it(no_default):
    torch.manual_seed(0)
    module = Counted()
    model, x = ORTModule(module), torch.randn(64, 6)
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        y = model(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states), "neither the export nor the comparison may draw from the user's generator"
    assert 0.15 < (y == 0).float().mean() < 0.45
    assert module.drop.p == 0.3 and onnxtrain.stats(model)["engine_steps"] == 2


def test_a_wrong_gradient_is_refused(no_default, caplog, monkeypatch):
    monkeypatch.setattr(rewrite, "_barrier", lambda result, args: result)  # detach() is lost
    torch.manual_seed(0)
    module = Counted(True)
    module.drop.p = 0.0
    eager, model, x = copy.deepcopy(module), ORTModule(module), torch.randn(5, 6)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(2):
            model(x).square().sum().backward(), eager(x).square().sum().backward()
    for p, q in zip(eager.parameters(), module.parameters()):
        torch.testing.assert_close(q.grad, p.grad)
    for p, q in zip(eager.buffers(), module.buffers()):
        torch.testing.assert_close(q, p)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 0 and counts["fallback_steps"] == 2
    assert caplog.text.count("torchscript exporter's graph is wrong: for one batch, grad") == 1
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleTorchModelException, match="refused"):
        ORTModule(module)(x)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_the_exporter_can_be_chosen(exporter, monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_EXPORTER", exporter)
    model = ORTModule(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = torch.randn(2, 3)
    torch.testing.assert_close(model(x), model.module(x))
    (program,) = model._all_programs()[0][1]
    assert program.exported.exporter == exporter
    assert onnxtrain.stats(model)["engine_steps"] == 1
