"""register_graph_optimizer: the engine runs, and differentiates, what the function leaves."""

import pytest
import torch

import onnxtrain
from onnxtrain.ortmodule import ORTModule, graph_optimizer_registry, register_graph_optimizer


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    found = []
    monkeypatch.setattr(graph_optimizer_registry, "_optimizers", found)
    return found


class Cosine(torch.nn.Module):
    def forward(self, x):
        return torch.cos(x)


def renamed(old, new):
    def rename(graph):
        for node in graph.node:
            if node.op_type == old:
                node.op_type = new

    return rename


def result(module):
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    model = ORTModule(module)
    y = model(x)
    y.sum().backward()
    assert onnxtrain.stats(model)["fallback_steps"] == 0
    return y.detach(), x.grad, x.detach()


def test_the_gradient_is_that_of_the_changed_graph():
    assert register_graph_optimizer()(change := renamed("Cos", "Sin")) is change
    y, gradient, x = result(Cosine())
    torch.testing.assert_close(y, x.sin())
    torch.testing.assert_close(gradient, x.cos())


@pytest.mark.parametrize("modules, devices, expected", [
    ("Cosine", "all", torch.sin), ("Other|Cosine", "cpu|cuda", torch.sin), ("Other", "all", torch.cos),
    ("all", "cuda", torch.cos)])
def test_modules_and_devices(modules, devices, expected):
    register_graph_optimizer(target_modules=modules, devices=devices)(renamed("Cos", "Sin"))
    y, _, x = result(Cosine())
    torch.testing.assert_close(y, expected(x))


def test_higher_priority_first():
    register_graph_optimizer(priority=1)(renamed("Sin", "Exp"))
    register_graph_optimizer(priority=2)(renamed("Cos", "Sin"))
    register_graph_optimizer(priority=2)(renamed("Sin", "Neg"))
    y, _, x = result(Cosine())
    torch.testing.assert_close(y, -x)


def test_names_of_inputs_and_outputs_stay(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")

    @register_graph_optimizer()
    def break_it(graph):
        graph.output[0].name = "other"

    with pytest.raises(Exception, match="the graph optimizer .*break_it changed the names of the graph's inputs or"):
        ORTModule(Cosine())(torch.ones(2, requires_grad=True))
