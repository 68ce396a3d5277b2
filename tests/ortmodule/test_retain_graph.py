"""backward twice over one forward: the engine runs forward again, with the same dropout."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import X, Y, both, in_engine, module

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))


def test_a_retained_graph_gives_the_same_gradients_each_time():
    def use(m):
        x = X.detach().clone().requires_grad_(True)
        loss = m(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        first = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        return x.grad, first, {name: b.clone() for name, b in m.named_buffers()}

    model = both(network, use)
    assert in_engine(model)["engine_steps"] == 1


def test_two_losses_of_one_forward():
    """As in multi-task training: heads, and the result that they share, each with a backward of its own."""

    def use(m):
        x = X.detach().clone().requires_grad_(True)
        first, second = m(x)
        a, b, c = first.square().sum(), F.cross_entropy(second, torch.tensor([0, 1, 3])), (first * second).sum()
        a.backward(retain_graph=True)
        alone = m.second.weight.grad
        b.backward(retain_graph=True)
        c.backward()
        return alone is None, x.grad

    in_engine(both(module(lambda self, x: (torch.tanh(self.fc(x)), self.second(x)), second=lambda: nn.Linear(4, 4)),
                   use))


def test_generator_and_critic_of_one_forward():
    """The critic's scores of a sample are differentiated twice: for its own weights, and for the generator's."""
    results = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        g, d = wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))), wrap(network())
        for _ in range(2):
            scores = d(g(torch.randn(5, 4)))
            mine = torch.autograd.grad(F.softplus(scores).mean(), list(d.parameters()), retain_graph=True)
            F.softplus(-scores).mean().backward()
            with torch.no_grad():
                for p, grad in zip(d.parameters(), mine):
                    p -= 0.1 * grad
                for p in g.parameters():
                    p -= 0.1 * p.grad
            d.zero_grad(), g.zero_grad()
        results.append([p.detach() for p in (*g.parameters(), *d.parameters())])
    for a, b in zip(*results):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    in_engine(g, 2), in_engine(d, 2)


@pytest.mark.parametrize("make", [
    lambda: nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 4)),
    lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True),
])
def test_the_same_dropout(make):
    model = ORTModule(make())
    x = torch.randn(2, 3, 4, requires_grad=True)
    state = torch.get_rng_state()
    loss = model(x).square().sum()
    after = torch.get_rng_state()
    seen = []
    for last in (False, False, True):
        model.zero_grad()
        x.grad = None
        loss.backward(retain_graph=not last)
        seen.append([x.grad, *(p.grad for p in model.parameters())])
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(state, after)
    for again in seen[1:]:
        for a, b in zip(seen[0], again):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    assert in_engine(model)["engine_steps"] == 1


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + x


def test_a_graph_in_pieces():
    def use(m):
        loss = m(X.detach()).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    in_engine(both(module(lambda self, x: torch.tanh(Doubling.apply(self.fc(x)))), use))


def test_one_node_for_all_parameters(monkeypatch):
    monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", "1")

    def use(m):
        loss = m(X.detach()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    in_engine(both(network, use))


@pytest.mark.parametrize("value", [2.0, -2.0])
def test_a_branch_that_the_values_choose(value):
    def forward(self, x, s):
        return torch.cond(s.sum() > 0, lambda x: self.fc(x) * 2, lambda x: x * 3, (x,))

    def use(m):
        x = X.detach().clone().requires_grad_(True)
        loss = m(x, torch.tensor([value])).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    in_engine(both(module(forward), use))


def test_without_retain_graph_the_error_is_torchs():
    def use(m):
        loss = m(X.detach()).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time.*retain_graph=True"):
            loss.backward()

    in_engine(both(network, use))


@pytest.mark.parametrize("change, text", [
    (lambda m, x: m.fc.weight.mul_(2), "modified by an inplace operation"),
    (lambda m, x: m.fc.bias.mul_(2), "modified by an inplace operation.*parameter fc.bias"),
    (lambda m, x: x.mul_(2), "modified by an inplace operation"),
])
def test_changes_between_two_backwards_are_an_error(change, text):
    model = ORTModule(module(lambda self, x: torch.tanh(self.fc(x)))())
    x = Y.clone()
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        change(model, x)
    with pytest.raises(RuntimeError, match=text):
        loss.backward()


def test_changes_in_a_graph_with_a_function_of_python_are_an_error():
    """The message names an input of the segment that reads the bias."""
    model = ORTModule(module(lambda self, x: torch.tanh(self.fc(Doubling.apply(x)))[:, :3].exp())())
    loss = model(Y.clone().requires_grad_()).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model.fc.bias.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: input fc.bias"):
        loss.backward()


class Counting(nn.Module):
    """Its result depends on a buffer that it writes, and one that it only writes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.ones(()))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.steps.add_(1)
        self.seen.add_(x.sum(0))
        return torch.tanh(self.fc(x)) * self.steps.clone()


def test_a_buffer_that_forward_reads_and_writes():
    def use(m):
        seen = []
        for _ in range(2):
            loss = m(Y).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            seen.append(m.steps.clone())
        return seen, m.seen

    in_engine(both(Counting, use))


def test_an_argument_that_forward_changes():
    def forward(self, x):
        return torch.tanh(self.fc(x.mul_(2)))

    def use(m):
        x = Y.clone()
        loss = m(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return x

    in_engine(both(module(forward), use))


def test_what_is_held_goes_with_the_graph():
    """A retained graph holds the call's arguments; one that is not, holds them no longer than until its backward."""
    model = ORTModule(network())
    for retain in (True, False):
        x = torch.randn(3, 4)
        gone = weakref.ref(x)
        loss = model(x).square().sum()
        del x
        assert gone() is not None
        loss.backward(retain_graph=retain)
        assert (gone() is None) == (not retain)
        del loss
        gc.collect()
        assert gone() is None


def test_activations_exist_once():
    """Between two backwards there are none, so that many graphs can be retained."""
    model = ORTModule(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)], nn.Tanh()))
    x = torch.randn(512, 64)
    losses = [model(x).square().sum() for _ in range(4)]
    for loss in losses:
        loss.backward(retain_graph=True)
    before = _C.live_blocks()
    for _ in range(3):
        for loss in losses:
            loss.backward(retain_graph=True)
    assert _C.live_blocks() <= before + 2
    in_engine(model)


def test_a_held_input_of_another_shape_is_refused():
    from onnx import TensorProto, helper

    graph = helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "g",
                              [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)],
                                           ir_version=10).SerializeToString())
    x = torch.randn(4)
    (y,), run = session.forward([x], b"\1")
    saved = run.saved([x], [y], "call")
    assert run.inputs[0] is x and run.call == "call" and not run.over and run.changed() == []
    (want,) = run.backward(saved, [torch.ones(4)])
    assert run.over
    run.again()
    assert not run.over and torch.equal(run.backward(saved, [torch.ones(4)])[0], want)
    x.resize_(2)
    assert run.changed() in ([], [0])
    with pytest.raises(ValueError, match="'x' came back with another dtype or shape"):
        run.again()
    run.forget()
    assert run.inputs is None and run.call is None
    for method in (run.again, run.changed):
        with pytest.raises(RuntimeError, match="not held"):
            method()
    with pytest.raises(ValueError, match="0 inputs, expected 1"):
        run.saved([], [y], None)


def test_copies_of_a_model_do_not_share_graphs():
    model = ORTModule(network())
    loss = model(X.detach()).square().sum()
    other = copy.deepcopy(model)
    other(X.detach()).sum().backward()
    loss.backward(retain_graph=True)
    loss.backward()
    assert onnxtrain.stats(model)["engine_steps"] == 1
