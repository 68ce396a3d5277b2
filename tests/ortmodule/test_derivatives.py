"""Derivatives inside forward, as forces and gradient penalties are: in the engine where Dynamo traces them, else in
PyTorch, and results, gradients and buffers are eager's from the first call on."""

import copy

import pytest
import torch
import torch.nn as nn
from agree import X, both, module
from functions import Cubed

import onnxtrain
from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException

TRACED = hasattr(torch._dynamo.config, "trace_autograd_ops")  # not in torch 2.10
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def slope(energy, x, **options):
    (found,) = torch.autograd.grad(energy.sum(), x, create_graph=True, **options)
    return found


@torch.compiler.disable
def hidden_slope(energy, x):
    return slope(energy, x)


def forces(m, x):
    x = x.detach().requires_grad_()
    energy = m.net(x * m.cutoff)
    return energy + slope(energy, x).square().sum()


def behind_a_cut(m, x):
    x = x.detach().requires_grad_()
    rows = m.scale(m.fc(x))
    torch._dynamo.graph_break()
    energy = m.net(rows * m.cutoff)
    return energy + slope(energy, x).square().sum()


def of_an_inner_tensor(m, x):
    rows = m.fc(x)
    energy = m.net(rows * m.cutoff)
    return energy + slope(energy, rows).square().sum()


def of_an_inner_tensor_of_an_earlier_part(m, x):
    rows = m.scale(m.fc(x))
    twice = rows * 2
    torch._dynamo.graph_break()
    energy = m.net(rows * m.cutoff + twice)
    return energy + slope(energy, twice).square().sum()


def where_dynamo_does_not_look(m, x):
    x = x.detach().requires_grad_()
    energy = m.net(m.fc(x) * m.cutoff)
    return energy + hidden_slope(energy, x).square().sum()


def of_an_inner_tensor_where_dynamo_does_not_look(m, x):
    rows = m.fc(x)
    energy = m.net(rows * m.cutoff)
    return energy + hidden_slope(energy, rows).square().sum()


def twice(m, x):
    x = x.detach().requires_grad_()
    values = m.net(x * m.cutoff)
    first = slope(values, x)
    return values + sum([slope(first[:, i], x)[:, i] for i in range(4)])[:, None]


def with_dropout(m, x):
    x = x.detach().requires_grad_()
    energy = m.net(nn.functional.dropout(m.fc(x), 0.3))
    return energy + slope(energy, x).square().sum()


def by_backward(m, x):
    x = x.detach().requires_grad_()
    energy = m.net(x * m.cutoff)
    energy.sum().backward(create_graph=True)
    return energy + x.grad.square().sum()


def jacobian(m, x):
    found = torch.autograd.functional.jacobian(lambda x: m.net(m.fc(x) * m.cutoff).sum(0), x, create_graph=True)
    return m.net(x) + found.square().sum()


def with_a_function(m, x):
    x = x.detach().requires_grad_()
    energy = m.net(Cubed.apply(m.fc(x)) * m.cutoff)
    return energy + slope(energy, x).square().sum()


def only_while_dynamo_is_away(m, x):
    x = x.clone()
    if not torch.compiler.is_compiling():
        x.requires_grad_()
    energy = m.net(m.fc(x))
    return energy + slope(energy, x).square().sum()


def of_many_operators(m, x):
    x = x.detach().requires_grad_()
    h = nn.functional.layer_norm(m.fc(x), (4,)) + torch.softmax(x, -1).exp().sqrt() * torch.sigmoid(x) / (1 + x.square())
    pairs = (h[:, None] - h[None] + 0.1).norm(dim=-1)[:, :2]
    chosen = torch.where(h > 0, h, nn.functional.gelu(h))[:, 1:].clamp(-3, 3) + x[[0, 1, 2, 2, 0][:len(x)], :3]
    energy = m.net(nn.functional.silu(torch.cat([chosen, pairs[:, :1]], 1)))
    return energy + slope(energy, x).square().sum()


def of_several(m, x):
    x, y = x.detach().requires_grad_(), (x * 2).detach().requires_grad_()
    values = m.net(x * y)
    first, second, third = torch.autograd.grad([values.sum(), values.square().mean()], [x, y, m.fc.weight],
                                               [None, torch.tensor(0.5)], create_graph=True, allow_unused=True)
    assert third is None
    return values + (first * second).sum()


def without_a_graph(m, x):
    x = x.detach().requires_grad_()
    energy = m.net(m.fc(x))
    (found,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
    return energy * found.square().sum()


def of_equal_layers(m, x):
    """Of which Dynamo's work for the first is remembered for the others."""
    x = x.detach().requires_grad_()
    h = x
    for layer in m.alike:
        h = h + nn.functional.silu(layer(h))
    energy = m.net(h)
    return energy + slope(energy, x).square().sum()


IN_ENGINE = (of_equal_layers, forces, of_an_inner_tensor, twice, only_while_dynamo_is_away, of_many_operators, of_several, without_a_graph)
FORWARDS = (behind_a_cut, of_an_inner_tensor_of_an_earlier_part, where_dynamo_does_not_look,
            of_an_inner_tensor_where_dynamo_does_not_look, by_backward, jacobian, with_a_function)


def made(forward):
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.net, self.scale = nn.Linear(4, 4, bias=False), net(), nn.BatchNorm1d(4)
            self.register_buffer("cutoff", torch.tensor([2.0]))
            self.alike = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return forward(self, x)

    return Made


def three_steps(m):
    results = []
    for i in range(3):
        torch.manual_seed(i)
        m.zero_grad()
        loss = m(X + i).square().mean()
        loss.backward()
        results.append(loss.detach())
    return results, list(m.buffers())


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_training_is_eagers_and_said_once(forward, caplog):
    model = both(made(forward), three_steps, tolerance=1e-4)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (0, 3)
    said = [record.getMessage() for record in caplog.records if "runs in PyTorch" in record.getMessage()]
    assert len(said) == 1
    assert f"in {__file__}, line " in said[0]
    assert any("differentiate" in reason for reason in counts["reasons"])
    model(X).sum().backward()
    assert onnxtrain.stats(model)["exports"] == counts["exports"]


@pytest.mark.skipif(not TRACED, reason="this torch cuts the graph there")
@pytest.mark.parametrize("forward", IN_ENGINE, ids=lambda forward: forward.__name__)
def test_in_the_engine(forward):
    counts = onnxtrain.stats(both(made(forward), three_steps, tolerance=1e-3))
    assert (counts["engine_steps"], counts["fallback_steps"]) == (3, 0), counts["reasons"]


F = nn.functional
OPERATORS = {  # of h = fc(x) and x, both of shape (3, 4), with second gradients in PyTorch
    "activations": lambda h, x: F.silu(h) + F.gelu(h) + F.gelu(h, approximate="tanh") + F.elu(h) + F.softplus(h)
    + F.mish(h) + F.leaky_relu(h * x) + F.relu(h * x) + torch.sigmoid(h) + h.tanh() + h.erf(),
    "powers": lambda h, x: h.exp() + (h.square() + 1).sqrt() + (h.square() + 1).rsqrt() + (h.square() + 1).log() + h ** 3
    + h / (1 + x.square()) + h.sin() * x.cos() + torch.atan2(h, x) + (h * x).abs(),
    "norms": lambda h, x: F.layer_norm(h, (4,)) + F.group_norm(h, 2) + torch.softmax(h, -1)
    + h.logsumexp(-1, keepdim=True) * x + (h[:, None] - h[None] + 0.1).norm(dim=-1)[:, :1] * x,
    "reductions": lambda h, x: h.prod(-1, keepdim=True) * x + (h * x).mean(0, keepdim=True) * x + (h * x).cumsum(0)
    + (h * x).amax(-1, keepdim=True) * x,
    "products": lambda h, x: torch.bmm(h[:, None], h[:, :, None])[:, 0] * x + torch.einsum("bi,bj->bij", h, x).sum(1)
    + torch.linalg.cross(h[:, :3], x[:, :3]).sum(-1, keepdim=True) * x
    + F.conv1d(x[:, None], h[:, None, :3], padding=1).sum(1),
    "picked": lambda h, x: torch.where(x > 0, h, x) + (h * x).clamp(-0.3, 0.3) + (h * x)[[0, 2, 2]]
    + torch.cat([h[:, 1:], x[:, :1]], 1) + torch.zeros(2, 4).index_add(0, torch.tensor([0, 1, 1]), h * x)[[0, 1, 1]]
    + torch.zeros(3, 4).scatter_add(0, torch.tensor([[0, 1, 1, 2]] * 3), h * x),
}


@pytest.mark.skipif(not TRACED, reason="this torch cuts the graph there")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_whose_gradients_are_differentiated(name):
    def forward(m, x):
        x = x[:3].detach().requires_grad_()
        energy = m.net(OPERATORS[name](m.fc(x), x))
        return energy + slope(energy, x).square().sum()

    counts = onnxtrain.stats(both(made(forward), three_steps, tolerance=1e-3))
    assert (counts["engine_steps"], counts["fallback_steps"]) == (3, 0), counts["reasons"]


def test_forces_with_dropout_are_those_of_the_energy():
    """With its mask, which is the engine's own: by differences of the energy for the same seed."""
    torch.manual_seed(0)
    model = ORTModule(made(lambda m, x: pair(m, x))())

    def at(x):
        torch.manual_seed(1)
        return model(x.float())

    x, step = X.double(), 1e-2
    _, found = at(x)
    for i, k in ((0, 0), (1, 3), (2, 1)):
        moved = torch.zeros_like(x)
        moved[i, k] = step
        slope_there = (at(x + moved)[0].sum() - at(x - moved)[0].sum()) / (2 * step)
        torch.testing.assert_close(found[i, k], slope_there, rtol=2e-2, atol=2e-3)


def pair(m, x):
    x = x.detach().requires_grad_()
    energy = m.net(nn.functional.dropout(m.fc(x), 0.3))
    return energy, slope(energy, x)


@pytest.mark.parametrize("forward", [forces, behind_a_cut, of_an_inner_tensor, where_dynamo_does_not_look,
                                     with_a_function],
                         ids=lambda forward: forward.__name__)
def test_as_a_backend_of_torch_compile(forward):
    torch.manual_seed(0)
    eager = made(forward)()
    compiled = torch.compile(copy.deepcopy(eager), backend="onnxtrain")
    want, got = three_steps(eager), three_steps(compiled)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


def test_gradients_that_need_no_graph_are_the_engines():
    def forward(m, x):
        x = x.detach().requires_grad_()
        energy = m.net(x).sum()
        (found,) = torch.autograd.grad(energy, x, retain_graph=True)
        return energy + found.square().sum()

    def use(m):
        m.eval()
        return [m(X).detach() for _ in range(3)]

    model = both(module(forward, net=net), use)
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_calls_that_do_not_differentiate_stay_in_the_engine():
    def forward(m, x, penalty=None):
        if penalty is None:
            return m.net(x)
        x = x.detach().requires_grad_()
        energy = m.net(x)
        return energy + slope(energy, x).square().sum() * penalty

    def use(m):
        return [m(X, **more).detach() for more in ({}, {"penalty": 0.5}, {}, {"penalty": 0.5}, {})]

    model = both(module(forward, net=net), use)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == ((5, 0) if TRACED else (3, 2))


def test_the_policy_may_forbid_it(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleTorchModelException, match=r"forward differentiates in .*test_derivatives.py, line \d+"):
        ORTModule(made(behind_a_cut)())(X)
