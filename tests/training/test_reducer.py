"""The engine writes gradients into buckets, which are reduced while backward runs."""

import pytest
import torch
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.training import _distributed
from onnxtrain.training._reducer import Reducer


class Twins:
    """The place of Peers: another process that always has the same gradients. Sums are there when they are waited for."""

    def __init__(self):
        self.started, self.waiting = [], 0

    def start_sum(self, value):
        self.started.append(value)
        self.waiting += 1

        def finish():
            self.waiting -= 1
            value.mul_(2)

        return finish

    def any_of(self, own, weights):
        return list(own)


class Net(torch.nn.Module):
    """Linear layers, one weight that is used twice, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(6, 6) for _ in range(3))
        self.twice, self.unused = torch.nn.Parameter(torch.randn(6)), torch.nn.Parameter(torch.ones(3))

    def forward(self, x, y):
        x = torch.tanh(self.second(F.gelu(self.first(x))) * self.twice)
        return F.mse_loss(self.last(x) + self.twice, y)


def case(monkeypatch, bucket=100):
    """A module, its ORTModule and reducer; buckets are of about this many bytes."""
    monkeypatch.setattr(_distributed, "_BUCKET", bucket)
    torch.manual_seed(0)
    module, peers = Net(), Twins()
    reducer = Reducer(module.parameters(), peers)
    model = ORTModule(module)
    model._join(reducer)
    return module, model, reducer, peers


def batch(seed):
    torch.manual_seed(seed)
    return torch.randn(5, 6), torch.randn(5, 6)


def expected(module, *seeds):
    """Twice the sums of eager's gradients."""
    losses = [2 * module(*batch(seed)) for seed in seeds]
    return torch.autograd.grad(sum(losses), list(module.parameters()), allow_unused=True)


def step(model, reducer, seed, last=True, outside=lambda loss: loss):
    reducer.begin(last)
    loss = outside(model(*batch(seed)))
    reducer.backward(loss)
    loss.backward()


def check(module, wanted):
    for (name, weight), gradient in zip(module.named_parameters(), wanted):
        assert (weight.grad is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(weight.grad, gradient, msg=lambda text, n=name: f"{n}: {text}")


def test_buckets_are_reduced_while_backward_runs(monkeypatch):
    module, model, reducer, peers = case(monkeypatch)
    for seed in range(3):
        module.zero_grad()
        wanted = expected(module, seed)
        peers.started.clear()
        step(model, reducer, seed)
        buckets = [bucket.flat for bucket in reducer._buckets]
        # The last bucket has the weight without a gradient, and waits.
        assert reducer.early == len(peers.started) == len(buckets) - 1 > 3
        reducer.finish()
        assert [a.data_ptr() for a in peers.started] == [b.data_ptr() for b in buckets] and peers.waiting == 0
        check(module, wanted)
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_the_last_weights_are_reduced_first(monkeypatch):
    module, model, reducer, peers = case(monkeypatch)
    module.unused.requires_grad_(False)
    module.twice.requires_grad_(False)
    reducer._weights = [weight for weight in module.parameters() if weight.requires_grad]
    for seed in range(2):
        module.zero_grad()
        step(model, reducer, seed)
        assert reducer.early == len(peers.started) == len(reducer._buckets) > 3
        reducer.finish()
        peers.started.clear()
        grads = [weight.grad.clone() for weight in reducer._weights]
        module.zero_grad()
        for own, other in zip(grads, torch.autograd.grad(2 * module(*batch(seed)), reducer._weights)):
            torch.testing.assert_close(own, other)
    assert reducer._buckets[0].gradients[0].shape == module.last.bias.shape


def test_accumulation_adds_and_reduces_once(monkeypatch):
    module, model, reducer, peers = case(monkeypatch)
    wanted = expected(module, 1, 2, 3)
    for seed in (1, 2, 3):
        step(model, reducer, seed, last=seed == 3)
        assert bool(peers.started) == (seed == 3)
    reducer.finish()
    check(module, wanted)


@pytest.mark.parametrize("before", ["autograd", "zeros"])
def test_gradients_that_are_there_are_added_to(before, monkeypatch):
    module, model, reducer, _ = case(monkeypatch)
    wanted = expected(module, 1, 2)
    if before == "autograd":
        module(*batch(1)).backward()
    else:
        wanted = expected(module, 2)
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)
    step(model, reducer, 2)
    reducer.finish()
    if before == "zeros":
        wanted = [torch.zeros(3) if gradient is None else gradient for gradient in wanted]
    check(module, wanted)


def test_a_weight_that_is_used_outside_as_well_is_reduced_when_it_is_whole(monkeypatch):
    module, model, reducer, peers = case(monkeypatch)
    module.unused.requires_grad_(False)
    reducer._weights = [weight for weight in module.parameters() if weight.requires_grad]
    wanted = torch.autograd.grad(2 * (module(*batch(1)) + module.last.bias.square().sum()), reducer._weights)
    step(model, reducer, 1, outside=lambda loss: loss + module.last.bias.square().sum())
    assert not peers.started and reducer.early == 0
    reducer.finish()
    for weight, gradient in zip(reducer._weights, wanted):
        torch.testing.assert_close(weight.grad, gradient)


def test_a_hook_sees_its_gradient(monkeypatch):
    module, model, reducer, _ = case(monkeypatch)
    seen = []
    module.last.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    wanted = expected(module, 4)
    step(model, reducer, 4)
    reducer.finish()
    check(module, wanted)
    torch.testing.assert_close(2 * seen[0], module.last.weight.grad)


class Two(torch.nn.Module):
    """A loss, and scores by a weight that the loss does not need."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)

    def forward(self, x, y):
        x = self.body(x)
        return F.mse_loss(x, y), self.head(x)


def test_a_weight_behind_another_output_has_no_gradient():
    torch.manual_seed(0)
    module, peers = Two(), Twins()
    reducer, model = Reducer(module.parameters(), peers), ORTModule(module)
    model._join(reducer)
    for seed in range(2):
        module.zero_grad()
        wanted = torch.autograd.grad(2 * module(*batch(seed))[0], list(module.parameters()), allow_unused=True)
        reducer.begin(True)
        loss, scores = model(*batch(seed))
        reducer.backward(loss)
        loss.backward()
        reducer.finish()
        assert wanted[2] is None and scores.shape == (5, 2)
        check(module, wanted)


def test_what_pytorch_runs_is_reduced_as_well(monkeypatch):
    module, _, reducer, peers = case(monkeypatch)
    wanted = expected(module, 5)
    step(module, reducer, 5)
    assert not peers.started
    reducer.finish()
    check(module, wanted)
