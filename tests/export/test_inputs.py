"""Inputs of an export: those with a gradient of their own, those that forward leaves unused,
those of no supported kind.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.export import ExportError, export
from onnxtrain.ortmodule import ORTModule


class Unused(nn.Module):
    """Two of its four inputs; the sizes of the unused ones may be anything."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, a, b, c, d):
        return self.fc(b) * d


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_an_input_that_holds_a_gradient_is_exported_once_for_all_sizes(kind, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    eager, model = copy.deepcopy(net), ORTModule(net)
    for rows in (4, 7, 2):
        x = torch.randn(rows, 3).requires_grad_()
        x = nn.Parameter(x.detach()) if kind is nn.Parameter else x
        eager(x).sum().backward()
        expected = x.grad.clone()
        model(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * expected)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (3, 0, 1)
    assert model._all_programs()[0][1][0].exported.exporter == "dynamo"


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_unused_inputs_are_no_inputs_of_the_graph(exporter, monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_CAPTURE", "export")  # Dynamo leaves out what no operation takes
    monkeypatch.setenv("ONNXTRAIN_EXPORTER", exporter)
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    torch.manual_seed(0)
    net = Unused()
    eager, model = copy.deepcopy(net), ORTModule(net)
    given = [torch.randn(2, 3) for _ in range(4)]  # of one shape: an exchange of two would fit
    given[0] = torch.randn(5)
    for _ in range(2):
        torch.testing.assert_close(model(*given), eager(*given))
        model(*given).sum().backward()
        eager(*given).sum().backward()
    torch.testing.assert_close(net.fc.weight.grad, eager.fc.weight.grad)
    exported = model._all_programs()[0][1][0].exported
    assert {source.name: source.target for source in exported.inputs if source.kind == "user"} == {"b": 1, "d": 3}


class Holder:
    def __init__(self, value):
        self.value = value


def test_an_argument_of_no_supported_kind_is_named():
    class Net(nn.Module):
        def forward(self, x, holder, *, other=None):
            return x * holder.value

    x = torch.ones(2)
    with pytest.raises(ExportError, match=r"does not support input type <class '.*Holder'> for input holder"):
        export(Net(), (x, Holder(2.0)), {}, training=True)
    with pytest.raises(ExportError, match=r"does not support input type <class '.*Holder'> for input other"):
        export(Net(), (x, None), {"other": Holder(2.0)}, training=True)


def test_a_call_without_any_tensor_has_nothing_to_run():
    class Product(nn.Module):
        def forward(self, a, b=2):
            return a * b

    with pytest.raises(ExportError, match=r"input type <class 'int'> for input a: .* nothing to run"):
        export(Product(), (3,), {}, training=True)
    assert ORTModule(Product())(3, b=4) == 12
