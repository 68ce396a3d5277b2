"""Clones, copies and replaced parameters: each call runs the tensors that stand in the module, or in the clone, that is
called, in the graphs that there are."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn as nn
from agree import X, Y, equal, in_engine

from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.own, self.scale = nn.Parameter(torch.ones(3)), 1.0

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x)))) * self.own * self.scale


def clone(module, replace=lambda p: p.clone()):
    """As libraries for meta-learning clone: without __init__, by dicts."""
    made = module.__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    made._parameters = {name: None if p is None else replace(p) for name, p in module._parameters.items()}
    made._buffers = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    made._modules = {name: clone(child, replace) for name, child in module._modules.items()}
    return made


def adapt(model, loss, create_graph):
    weights = list(model.parameters())
    grads = torch.autograd.grad(loss, weights, create_graph=create_graph, allow_unused=True)
    new = {id(p): p if g is None else p - 0.3 * g for p, g in zip(weights, grads)}
    for child in model.modules():
        for name, p in child._parameters.items():
            child._parameters[name] = new[id(p)]


def adapted(model, create_graph):
    fast = clone(model)
    for x in (X, X + 1):
        adapt(fast, fast(x).square().mean(), create_graph)
    return fast(Y).square().mean()


class Outer(nn.Module):
    """Holds what it is given as a part."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.inner(x))


def with_a_copy(model):
    other = copy.copy(model)
    other.scale, other.a = 2.0, nn.Linear(4, 6)
    with torch.no_grad():
        other.a.weight.fill_(0.1)
    assert (other.scale, model.scale) == (2.0, 1.0)
    return other(X).square().mean() + model(Y).square().mean()


def with_a_deep_copy(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    return other(X).square().mean() + model(X).mean()


def with_other_tensors_for_one_call(model):
    weights = {name: p * 1.5 for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, (X,)).square().mean() + model(Y).mean()


def with_another_mode(model):
    other = clone(model)
    other.eval()
    assert model.training and not other.training and copy.copy(model).training
    return other(X).square().mean() + model(Y).mean() + other(Y).mean()


def with_a_made_weight(model):
    model.a._parameters["weight"] = model.a.weight * 2
    return model(X).square().mean()


def with_a_new_parameter(model):
    model.own = nn.Parameter(model.own.detach() * 2)
    model.a.weight = nn.Parameter(model.a.weight.detach() + 1)
    return model(X).square().mean()


def with_another_part(model):
    part = nn.Linear(4, 6)
    with torch.no_grad():
        part.weight.copy_(model.a.weight * 3)
    model.a = part
    return model(X).square().mean()


def with_a_tie(model):
    model.a.bias = nn.Parameter(model.a.bias.detach() + 1)
    model.norm.bias = model.a.bias
    return model(X).square().mean()


def with_assigned_weights(model):
    state = {name: value * 2 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model(X).square().mean()


def with_a_parametrization(model):
    class Shifted(nn.Module):
        def forward(self, weight):
            return weight + 1

    nn.utils.parametrize.register_parametrization(model.a, "weight", Shifted())
    return model(X).square().mean()


def with_norms(model):
    nn.utils.weight_norm(model.a)
    nn.utils.parametrizations.spectral_norm(model.b)
    return model(X).square().mean()


USES = (lambda model: adapted(model, True), lambda model: adapted(model, False), with_a_copy, with_a_deep_copy,
        with_other_tensors_for_one_call, with_another_mode, with_a_made_weight, with_a_new_parameter, with_another_part,
        with_a_tie, with_assigned_weights, with_a_parametrization, with_norms)
NAMES = ("maml", "first order maml", *[use.__name__ for use in USES[2:]])


def run(use, wrap, before):
    torch.manual_seed(0)
    model = wrap(Net())
    found = [model(X).square().mean()] if before else []
    for _ in range(2 if use in USES[:6] else 1):
        loss = use(model)
        loss.backward()
        found += [loss, *[p.grad.clone() for p in model.parameters() if p.is_leaf and p.grad is not None]]
    return model, [*found, *[b.clone() for b in model.buffers()]]


CASES = [(use, True) for use in USES] + [(use, False) for use in (USES[0], with_a_made_weight)]


@pytest.mark.parametrize("use, before", CASES, ids=[*NAMES, "maml at first", "a made weight at first"])
def test_each_call_runs_the_tensors_that_are_there(use, before):
    model, ours = run(use, ORTModule, before)
    _, eager = run(use, lambda m: m, before)
    assert len(ours) == len(eager)
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-3, atol=1e-5)
    in_engine(model)


def test_clones_of_what_holds_a_wrapper():
    def steps(wrap):
        torch.manual_seed(0)
        model = Outer(wrap(Net()))
        loss = adapted(model, False)
        loss.backward()
        return model, [loss, *[p.grad for p in model.parameters()]]

    ours, eager = steps(ORTModule), steps(lambda m: m)
    for a, b in zip(ours[1], eager[1], strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-3, atol=1e-5)
    in_engine(ours[0].inner)


def test_clones_share_graphs_and_nothing_else():
    model = ORTModule(Net())
    model(X).sum().backward()
    for i in range(3):
        other = clone(model, lambda p, i=i: nn.Parameter(p.detach() + i))
        equal(other(X), clone(model.module, lambda p, i=i: nn.Parameter(p.detach() + i))(X))
        other.scale, other.fresh = 9.0, nn.Linear(2, 2)
        assert model.scale == 1.0 and not hasattr(model, "fresh") and not hasattr(model.module, "fresh")
        assert other.module is not model.module and other.a is not model.a and len(list(other.parameters())) == 9
    assert in_engine(model)["exports"] == 1
    kept = weakref.ref(other.a.weight)
    del other
    model(X)
    gc.collect()
    assert kept() is None


def test_a_clone_outlives_the_original():
    model = ORTModule(Net())
    module = model.module
    other = clone(model)
    del model
    gc.collect()
    equal(other(X), clone(module)(X))
    in_engine(other)
    other(X).sum().backward()
    assert module.a.weight.grad is not None
