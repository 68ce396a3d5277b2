"""Runs the same code on eager PyTorch and on ORTModule and compares: results,
gradients of arguments and of parameters.
"""

import copy

import torch
import torch.nn as nn
from torch.utils import _pytree as pytree

import onnxtrain
from onnxtrain.ortmodule import ORTModule

#: Torch 2.10 cuts graphs in more places, and PyTorch runs some calls there: with equal results, but other counts.
RECENT = torch.__version__ >= (2, 11)


class Square(torch.autograd.Function):
    """Its backward is the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def in_engine(model, at_least=1):
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    assert counts["engine_steps"] >= at_least
    return counts


def equal(ours, eager, tolerance=1e-5):
    got, want = pytree.tree_flatten(ours), pytree.tree_flatten(eager)
    assert got[1] == want[1]
    for a, b in zip(got[0], want[0]):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and a.requires_grad == b.requires_grad
            torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance)
        else:
            assert type(a) is type(b) and a == b


def both(make, use, tolerance=1e-5):
    """use(model) on eager and on ORTModule: what it returns, and every gradient, are the same."""
    torch.manual_seed(0)
    module = make()
    eager, ours = copy.deepcopy(module), ORTModule(module)
    torch.manual_seed(1)
    want = use(eager)
    torch.manual_seed(1)
    got = use(ours)
    equal(got, want, tolerance)
    for (name, p), q in zip(eager.named_parameters(), ours.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=tolerance, atol=tolerance, msg=name)
    return ours


def trained(eager, calls):
    """stats() of the module wrapped, after a step with each of these arguments: results and gradients are eager's."""
    model = ORTModule(copy.deepcopy(eager))
    for args in calls:
        results = []
        for module in (eager, model):
            module.zero_grad()
            results.append(module(*args))
            (results[-1].square().sum() if results[-1].dim() else results[-1]).backward()
        torch.testing.assert_close(results[1], results[0])
        for (name, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=name)
    return onnxtrain.stats(model)


class Linear(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)


def module(forward, **parts):
    """A class with one linear layer `fc`, these submodules, and this forward."""

    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            for name, part in parts.items():
                setattr(self, name, part())

    Made.forward = forward
    return Made


def step(*args, **kwargs):
    """A use: one forward, backward from every output that has a gradient, gradients of the arguments returned."""

    def use(model):
        given = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad),
                                     (args, kwargs))
        # Before ORTModule knows more containers.
        tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]
        result = model(*given[0], **given[1])
        roots = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        if roots:
            sum((t * torch.linspace(0.5, 1.5, t.numel()).reshape(t.shape)).sum() for t in roots).backward()
        return result, [t.grad for t in tensors]

    return use


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5)).requires_grad_(True)
Y = torch.randn(3, 4, generator=torch.Generator().manual_seed(6))


def three(change=lambda m: None):
    """A use: three steps, the module changed before the second."""
    def use(m):
        results = [step(X)(m)[0]]
        change(m)
        return [*results, step(Y)(m)[0], step(X)(m)[0]]

    return use
