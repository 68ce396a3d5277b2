"""Gradients of gradients: the same code on eager PyTorch and on ORTModule, forward in the engine."""

import copy
import logging

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import X, Y, both, equal, in_engine, module
from functions import Cubed, Doubled
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import onnxtrain
from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException

NOTE = "create_graph=True"


class Tied(nn.Module):
    """One matrix for two layers, in two modules; and a parameter of the module itself."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.scale


class Recurrent(nn.Module):
    """An LSTM reads its weights from a list of its own."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x):
        return self.lstm(x.unsqueeze(0))[0]


def convolutional():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 6, 2, padding=1), nn.BatchNorm2d(6), nn.Softplus(),
                         nn.Flatten(), nn.Linear(54, 2), nn.BatchNorm1d(2), nn.Tanh())


MODULES = {
    "MLP": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Softplus()),
    "convolution and batch norm": convolutional,
    "transformer layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, F.gelu, batch_first=True),
    "tied weights": Tied,
    "LSTM": Recurrent,
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()),
}


def data(m):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3)).to(next(m.parameters()).dtype)
    return x.unsqueeze(0) if isinstance(getattr(m, "module", m), nn.TransformerEncoderLayer) else x


def penalty(m):
    """WGAN-GP: the norm of a gradient is part of the loss, which is outside of the module."""
    x = data(m).requires_grad_(True)
    seen = []
    for _ in range(2):
        scores = m(x)
        (grad,) = torch.autograd.grad(scores, x, torch.ones_like(scores), create_graph=True)
        loss = scores.square().mean() + ((grad.flatten(1).norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        seen += [grad.detach(), loss.detach()]
    return seen, x.grad, {name: b.clone() for name, b in m.named_buffers()}


def hessian_vector(m):
    """Of all parameters, by a second pass of the first gradients."""
    parameters = list(m.parameters())
    first = torch.autograd.grad(m(data(m)).square().sum(), parameters, create_graph=True)
    inner = sum((g * torch.linspace(-1, 1, g.numel()).reshape(g.shape)).sum() for g in first)
    second = torch.autograd.grad(inner, parameters, allow_unused=True)
    return [g.detach() for g in first], second


@pytest.mark.parametrize("use", [penalty, hessian_vector])
@pytest.mark.parametrize("name", MODULES)
def test_second_order(name, use):
    with sdpa_kernel(SDPBackend.MATH):  # the one of torch's that has second derivatives
        counts = in_engine(both(lambda: MODULES[name]().double(), use, 1e-6))
    assert counts["exports"] == 1 and any(NOTE in reason for reason in counts["reasons"])


def test_an_inner_loop_of_maml():
    """Two inner steps on fast weights that hang on the slow ones, then the outer gradient."""

    def use(m):
        fast = dict(m.named_parameters())
        for _ in range(2):
            loss = functional_call(m, fast, (Y,)).square().mean()
            grads = torch.autograd.grad(loss, fast.values(), create_graph=True)
            fast = {name: w - 0.1 * g for (name, w), g in zip(fast.items(), grads)}
        loss = (functional_call(m, fast, (X.detach(),)) - 1).square().mean()
        loss.backward()
        return loss

    in_engine(both(MODULES["MLP"], use), 3)


def test_an_input_that_hangs_on_a_parameter_and_a_module_in_a_row():
    """Each node has partial derivatives of its own: nothing is counted twice."""

    def use(m):
        first = m(m.fc.weight * 0.5)
        second = m(first)
        grads = torch.autograd.grad(second.square().sum(), [m.fc.weight, m.fc.bias], create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        return [g.detach() for g in grads]

    in_engine(both(module(lambda self, x: torch.tanh(self.fc(x))), use), 2)


def test_arguments_results_and_structures():
    def forward(self, batch, flag, *, power):
        h = torch.sin(self.fc(batch["x"]))
        batch["y"].mul_(h)  # an argument that is changed
        return {"h": h ** power, "rest": [batch["z"] * h if flag else h, h.view(-1)]}

    def use(m):
        x, z = X.detach().clone().requires_grad_(True), Y.clone().requires_grad_(True)
        y = Y.clone().requires_grad_(True)
        given = {"x": x, "y": y * 1, "z": z}
        out = m(given, True, power=2)
        total = out["h"].sum() + out["rest"][0].cos().sum() + out["rest"][1].exp().sum() + given["y"].square().sum()
        grads = torch.autograd.grad(total, [x, y, z, m.fc.weight], create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        return [g.detach() for g in grads], x.grad, y.grad, z.grad

    in_engine(both(module(forward), use, 1e-4))


def test_autocast_of_the_forward():
    def use(m):
        x = X.detach().clone().requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        (grad,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        assert out.dtype is torch.bfloat16
        grad.square().sum().backward()
        return grad.detach(), x.grad

    in_engine(both(module(lambda self, x: torch.tanh(self.fc(x))), use, 0.03))


def test_a_first_gradient_under_create_graph_leaves_the_run_for_a_second():
    """The engine's backward may follow, and a retained graph as well."""

    def use(m):
        x = X.detach().clone().requires_grad_(True)
        loss = m(x).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return grad.detach(), x.grad

    in_engine(both(MODULES["MLP"], use))


def test_said_once_at_warning(caplog):
    model = ORTModule(MODULES["MLP"]())
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(3):
            penalty(model)
    assert [NOTE in record.getMessage() for record in caplog.records].count(True) == 1
    assert NOTE in onnxtrain.explain(model)


def test_the_policy_may_forbid_it(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    model = ORTModule(MODULES["MLP"]())
    with pytest.raises(ORTModuleTorchModelException, match=NOTE):
        penalty(model)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 2


IN_PIECES = {
    "doubling": lambda self, x: Doubled.apply(self.fc(x)).square(),
    "at first": lambda self, x: self.fc(Cubed.apply(x)).tanh(),
    "at last": lambda self, x: Cubed.apply(torch.tanh(self.fc(x))),
    "two": lambda self, x: Cubed.apply(self.fc(Doubled.apply(self.fc(x)).tanh())),
    "of a parameter": lambda self, x: torch.nn.functional.linear(x.tanh(), Cubed.apply(self.fc.weight)),
    "with a buffer": lambda self, x: self.norm(Cubed.apply(self.fc(x).tanh())).tanh(),
    "two results": lambda self, x: Cubed.apply(self.fc(x)) + self.fc(x).argmax(),
}


@pytest.mark.parametrize("name", IN_PIECES)
def test_a_graph_in_pieces_has_second_gradients(name):
    def use(m):
        found = []
        for i in range(3):
            x = (X + i / 4).detach().requires_grad_(True)
            out = m(x)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = out.square().mean() + grad.square().sum()
            loss.backward()
            found += [loss.detach(), x.grad, grad.detach()]
        return found, [b.clone() for b in m.buffers()]

    model = both(module(IN_PIECES[name], norm=lambda: nn.BatchNorm1d(4)), use, tolerance=1e-4)
    assert in_engine(model, 3)["exports"] == 1
    assert any(NOTE in reason for reason in onnxtrain.stats(model)["reasons"])


def test_first_gradients_of_a_graph_in_pieces_are_the_engines():
    def use(m):
        x = X.detach().clone().requires_grad_(True)
        out = m(x)
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)
        out.square().sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
        return first, x.grad

    model = both(module(IN_PIECES["two"]), use)
    assert not in_engine(model)["reasons"]


def test_a_function_without_second_gradients_says_so():
    model = ORTModule(module(lambda self, x: Once.apply(self.fc(x)).square())())
    x = X.detach().clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    in_engine(model)


def test_pieces_without_such_arguments_say_why_no_second():
    model = ORTModule(module(lambda self, x: Doubled.apply(self.fc(x)).square())())
    (grad,) = torch.autograd.grad(model(X.detach()).sum(), model.fc.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="cut its graph into parts"):
        grad.sum().backward()
    in_engine(model)


@pytest.mark.parametrize("value", [2.0, -2.0])
def test_a_branch_that_the_values_choose_says_why_no_second(value):
    model = ORTModule(module(lambda self, x: torch.cond(x.sum() > 0, lambda x: self.fc(x).tanh(), lambda x: x * x,
                                                        (x,)))())
    x = torch.full((2, 4), value, requires_grad=True)
    plain = torch.autograd.grad(model(x).sum(), x)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    equal([grad.detach()], list(plain))
    with pytest.raises(RuntimeError, match="torch.cond, whose gradients"):
        grad.sum().backward()
    in_engine(model, 2)


@pytest.mark.parametrize("change, text", [
    (lambda m, x: m.fc.weight.mul_(2), "modified by an inplace"), (lambda m, x: x.mul_(2), "modified by an inplace"),
    (lambda m, x: m.fc.bias.mul_(2), "parameter fc.bias.*modified by an inplace|modified by an inplace.*fc.bias"),
])
def test_what_has_changed_since_forward_is_an_error(change, text):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.factor = nn.Linear(4, 4), 2.0

        def forward(self, x):
            return torch.tanh(self.fc(x)) * self.factor

    model = ORTModule(Scaled())
    x = Y.clone()
    out = model(x)
    with torch.no_grad():
        change(model, x)
    with pytest.raises(RuntimeError, match=text):
        torch.autograd.grad(out.sum(), model.fc.weight, create_graph=True)


def test_the_module_is_as_before():
    """Buffers are updated once, attributes and hooks stay, the random state moves no further."""

    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.held = nn.BatchNorm1d(4), {"calls": 0}
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return torch.tanh(self.norm(x)) * self.count

    model = ORTModule(Noting())
    x = Y.clone().requires_grad_(True)
    out = model(x)
    before = copy.deepcopy(model.state_dict()), dict(model.module.__dict__), torch.get_rng_state()
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    grad.sum().backward()
    assert model.count == 1
    equal(dict(model.state_dict()), dict(before[0]))
    assert model.module.__dict__ == before[1] and torch.equal(torch.get_rng_state(), before[2])
    assert identities == [id(t) for t in (*model.parameters(), *model.buffers())]
