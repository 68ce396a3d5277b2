"""Weights are inputs of a captured graph: equal layers share what runs them, and other tensors may stand in the places of
weights. And how much Python a call takes.
"""

import sys

import onnx
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import X, Y, both, in_engine, step

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._captured import Parts

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def cut(x):
    torch._dynamo.graph_break()
    return x


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return cut(self.fc(x) * x.shape[0]) + x


def test_layers_that_share_a_capture_have_open_sizes_each():
    model = both(lambda: nn.Sequential(Cut(), Cut()), lambda m: [step(x)(m) for x in (X, X[1:])])
    exports = in_engine(model, 2)["exports"]
    step(torch.cat([X, X]))(model)
    assert in_engine(model, 3)["exports"] == exports


class Tied(nn.Module):
    def __init__(self, out=4, tied=False):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, out)
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        self.count.add_(1)
        return cut(self.second(F.relu(self.first(x) + self.count)))


def test_equal_layers_between_cuts_are_exported_once():
    def layers():
        made = nn.Sequential(*[Tied(4, tied) for tied in (False, False, False, True, True, False)], Tied(5))
        made[1].first.weight.requires_grad_(False)
        return made

    model = both(layers, lambda m: [step(x)(m) for x in (X, Y, X)])
    # Plain and wider layers: a frozen one may be thawed later, and a tied one is a plain one that has a weight twice.
    counts = in_engine(model, 3)
    assert counts["exports"] == counts["programs"] == 2
    for _, (program,) in model._all_programs():
        names = [source.name for source in program.exported.inputs if source.kind != "user"]
        assert {value.name for value in onnx.load_from_string(program.exported.model).graph.input} >= set(names)


class Counts(nn.Module):
    """Writes one frozen parameter and reads another one, which may be the same."""

    def __init__(self, tied):
        super().__init__()
        self.written = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.read = self.written if tied else nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        self.written.add_(1)
        return cut(x + self.read)


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_an_equal_layer_two_of_whose_weights_are_one(order):
    model = both(lambda: nn.Sequential(nn.Linear(4, 4), *map(Counts, order)), lambda m: [step(x)(m) for x in (X, Y, X)])
    assert onnxtrain.stats(model)["programs"] >= 1


def test_equal_layers_find_their_weights_once(monkeypatch):
    found_by, plain = [], Parts.runner

    def runner(parts, *given):
        found_by.append(parts)
        return plain(parts, *given)

    monkeypatch.setattr(Parts, "runner", runner)

    def use(m):
        results = [step(X)(m) for _ in range(2)]
        found = len(found_by)
        results.append(step(X)(m))
        assert len(found_by) == found
        m[1].fc.weight = nn.Parameter(torch.ones(4, 4))
        return [*results, *[step(x)(m) for x in (X, Y)]]

    in_engine(both(lambda: nn.Sequential(Cut(), Cut(), Cut()), use), 5)


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "second.bias", "count"])
def test_another_tensor_in_the_place_of_a_weight(name):
    """A graph's inputs are its weights, whichever tensors the module holds: no second export, and create_graph=True,
    which runs the graph in PyTorch, sees them too.
    """
    def use(m):
        results = [step(X)(m) for _ in range(2)]
        path, _, last = name.rpartition(".")
        kind = nn.Buffer if last == "count" else nn.Parameter
        old = m.get_submodule(path).__getattr__(last)
        setattr(m.get_submodule(path), last, kind(torch.full_like(old, 0.5)))
        results += [step(x)(m) for x in (X, Y)]
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [*results, grad.detach(), *[p.grad.clone() for p in m.parameters()]]

    assert in_engine(both(Tied, use), 5)["exports"] == 1


def test_a_message_names_the_weight_of_its_layer():
    model, x = ORTModule(nn.Sequential(Cut(), Cut())), X.clone().requires_grad_()
    loss = model(x).sum()
    with torch.no_grad():
        model[1].fc.bias.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: parameter 1\.fc\.bias of"):
        torch.autograd.grad(loss, x, create_graph=True)


class Steps(nn.Module):
    """Writes a frozen parameter, and its argument."""

    def __init__(self):
        super().__init__()
        self.fc, self.steps = nn.Linear(4, 4), nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x, seen):
        self.steps.add_(1)
        seen.add_(1)
        return self.fc(x).tanh()


def test_create_graph_writes_nothing_twice():
    def use(m):
        seen = torch.zeros(2)
        for _ in range(2):
            x = X.clone().requires_grad_()
            (grad,) = torch.autograd.grad(m(x, seen).sum(), x, create_graph=True)
            grad.square().sum().backward()
        return seen, m.steps.detach().clone(), m.fc.weight.grad.clone()

    both(Steps, use)


def test_how_many_of_our_python_functions_a_call_takes():
    model, called = ORTModule(nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])), []
    for _ in range(3):
        model(X)

    def look(frame, event, _):
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("onnxtrain"):
            called.append(frame.f_code.co_qualname)

    sys.setprofile(look)
    try:
        model(X)
    finally:
        sys.setprofile(None)
    assert called and len(called) <= 15, called
