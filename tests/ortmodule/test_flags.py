"""What forward sees and changes of gradients: grad mode, requires_grad, parameters frozen inside;
a train-mode module under no_grad.
"""

import contextlib

import pytest
import torch
import torch.nn as nn
from agree import X, Y, both, in_engine, module, step
from torch import is_grad_enabled as by_another_name

MODES = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)
TWO = {"two": lambda: nn.Linear(4, 4)}


def in_every_mode(model, n=1):
    """Calls in train and eval mode, in every grad mode; results without their gradients."""
    results = []
    for _ in range(n):
        for training in (True, False):
            model.train(training)
            for mode in MODES:
                with mode():
                    results.append(model(X).clone())
                results[-1] = results[-1].detach().clone()
    return results


@pytest.mark.parametrize("asks", [lambda: torch.is_grad_enabled(), lambda: by_another_name(),
                                  lambda: torch.is_inference_mode_enabled()],
                         ids=["grad", "imported", "inference"])
def test_branches_on_the_grad_mode(asks):
    model = both(module(lambda self, x: self.fc(x) * (2.0 if asks() else 3.0)), lambda m: in_every_mode(m, 2))
    in_engine(model, 12)


def test_branches_on_requires_grad_of_arguments_parameters_and_results():
    def forward(self, x):
        h = self.fc(x) * (2.0 if x.requires_grad else 3.0)
        k = h * (5.0 if self.fc.weight.requires_grad else 7.0)
        return k * (0.5 if h.requires_grad else 0.25) + (1.0 if h.detach().requires_grad
                                                         else 0.0) + (x.is_leaf + (h.grad_fn is None))

    def use(model):
        results = []
        for x in (X, Y, X):
            for frozen in (False, True):
                model.requires_grad_(not frozen)
                results += [step(x)(model), model(x).requires_grad]
                model.zero_grad()
        return results

    in_engine(both(module(forward), use), 12)


def test_forward_that_does_not_ask_shares_one_graph():
    model = both(module(lambda self, x: self.fc(x)),
                 lambda m: [m.eval(), *in_every_mode(m)[1:], step(X)(m), step(Y)(m)][1:])
    assert in_engine(model, 8)["exports"] == 2  # train and eval


def behind_detach(self, x):
    """Detached values of what has no gradient at first: the graph is made without one, and serves with one later."""
    scaled = self.fc(x) * (x.exp() * 2).detach() + x.norm().detach()
    return scaled / torch.linalg.norm(x, ord=2).detach() + self.two((self.two.weight[:1] * 2).detach())


def written_behind_detach(self, x):
    h = (x * 2).detach()
    h[0] = self.fc(x)[1]
    return h + x


@pytest.mark.parametrize("forward", [behind_detach, written_behind_detach])
def test_gradients_that_are_asked_for_in_a_later_step(forward):
    def use(model):
        results = []
        model.two.requires_grad_(False)
        for x in (X.detach(), X, X.detach()):
            results.append(step(x)(model))
            results += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            model.two.requires_grad_(True)
            model.zero_grad()
        return results

    model = both(module(forward, **TWO), use)
    if forward is behind_detach:
        assert in_engine(model, 3)["exports"] == 1


def codebook(self, x):
    """A moving average of what an encoder gives, as vector quantizers keep it: it has no gradient."""
    h = self.fc(x)
    self.mean.weight.data.mul_(0.9).add_(h.t() @ h, alpha=0.1)
    return h * self.mean.weight.sum(0)


def lerped(self, x):
    h = self.fc(x)
    self.mean.weight.data.lerp_(h.t() @ h, 0.1)
    return h @ self.mean.weight


def rows(self, x):
    h = self.fc(x)
    self.mean.weight.data[0] = h.mean(0)
    self.mean.weight.data[1].add_(h[0])
    return h * self.mean.weight.sum(0)


def read_there(self, x):
    h = self.fc(x)
    data = self.mean.weight.data
    data.lerp_(h.t() @ h, 0.1)
    return h @ data


@pytest.mark.parametrize("forward", [codebook, lerped, rows, read_there])
def test_values_with_gradients_written_through_data(forward):
    def made():
        model = module(forward, mean=lambda: nn.Linear(4, 4, bias=False))()
        model.mean.requires_grad_(False)
        return model

    def use(model):
        return [step(x)(model) + (model.mean.weight.clone(),) for x in (X, Y, X)]

    model = both(made, use)
    if forward is not read_there:  # where eager has the gradient
        in_engine(model, 3)


def test_train_mode_under_no_grad_keeps_batch_statistics_and_dropout():
    def use(model):
        results = []
        for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
            with mode():
                results.append(model(X * 3).clone())
            results[-1] = results[-1].detach().clone()
            results += [model.norm.running_mean.clone(), model.norm.running_var.clone(),
                        model.norm.num_batches_tracked.clone()]
        model.eval()
        with torch.no_grad():
            results += [model(X), model.norm.num_batches_tracked.clone()]
        return results

    in_engine(both(module(lambda self, x: self.norm(self.fc(x)), norm=lambda: nn.BatchNorm1d(4)), use), 4)

    model = both(module(lambda self, x: self.drop(x), drop=lambda: nn.Dropout(0.5)), lambda m: m.training)
    ones = torch.ones(64, 64)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            dropped = model(ones)
        assert 0.4 < (dropped == 0).float().mean() < 0.6 and set(dropped.unique().tolist()) == {0.0, 2.0}
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(ones), ones)
    in_engine(model, 3)


def frozen_for_a_while(self, x):
    h = self.fc(x)
    self.fc.requires_grad_(False)
    h = self.fc(h)
    self.fc.requires_grad_(True)
    return self.two(h)


def frozen_to_the_end(self, x):
    h = self.two(self.fc(x))
    for parameter in self.fc.parameters():
        parameter.requires_grad = False
    return h + self.fc(h)


def bias_alone(self, x):
    self.fc.bias.requires_grad_(False)
    return self.two(self.fc(x) + self.fc.bias)


def detached_first(self, x):
    return self.two(self.fc(x).detach().requires_grad_(False)) + self.fc(x)


@pytest.mark.parametrize("forward", [frozen_for_a_while, frozen_to_the_end, bias_alone, detached_first],
                         ids=lambda f: f.__name__)
def test_requires_grad_changed_inside_forward(forward):
    def use(model):
        first = step(X)(model)
        return first, [p.requires_grad for p in model.parameters()], step(X)(model), step(Y)(model)

    model = both(module(forward, **TWO), use)
    if forward is not frozen_to_the_end:  # by an assignment, for which Dynamo leaves forward to Python
        in_engine(model, 3)


def test_what_forward_made_and_drops_again_may_want_a_gradient():
    """Nobody sees that gradient; reentrant checkpoints ask for one."""
    forward = lambda self, x: self.two(self.fc(x).detach().requires_grad_(True)) + x  # noqa: E731
    in_engine(both(module(forward, **TWO), step(X)))


def test_flags_of_what_forward_returns():
    def forward(self, x):
        hidden = self.fc(x).detach().requires_grad_(True)
        return self.two(hidden) + x, hidden

    both(module(forward, **TWO), step(X))


def test_a_flag_of_an_argument():
    both(module(lambda self, x: self.fc(x.requires_grad_(True))), step(Y))


def test_gradients_read_inside_forward():
    def use(model):
        step(X)(model)
        return step(X)(model)

    both(module(lambda self, x: self.fc(x) + (0.0 if self.fc.bias.grad is None else self.fc.bias.grad)), use)


def test_arguments_that_forward_does_not_use():
    made = module(lambda self, unused, x, also=None: self.fc(x))
    # Of the shape of the weight, which must not take its place.
    square = X.detach()[:1].expand(4, 4).clone().requires_grad_(True)
    in_engine(both(made, step(square, X, also=Y)))
    in_engine(both(made, step(Y, X)))
