"""Python in forward that Dynamo takes for more than it is: equal to eager, without a cut, by one export for all sizes."""

from __future__ import annotations

import collections
import contextlib
import copy
import re
import sys
import threading
import types

import agree
import numpy as np
import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule

RECENT = torch.__version__ >= (2, 11)  # an older torch has words of its own for wrong arguments
EXPORTS = 1 if RECENT else 2  # and the formulas of some sizes as constants first
HOOKS = torch.__version__ >= (2, 13)  # from then on Dynamo captures what a hook computes
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(4, 4), nn.Linear(4, 2), use

    def forward(self, *args):
        return self.use(self, *args)


def trained(use, calls):
    torch.manual_seed(0)
    return agree.trained(Net(use), calls)


def in_the_engine(counts, steps):
    assert (counts["graph_breaks"], counts["reasons"]) == ([], []) and counts["exports"] <= EXPORTS
    assert (counts["engine_steps"], counts["fallback_steps"]) == (steps, 0)


def compared(m, x):
    y = x.new_ones(x.shape[0], 3, 4)
    h = m.first(x)
    h = h * 2 if np.prod(x.shape) < np.prod(y.shape) else h
    return (h * np.max(x.shape[1:])).sum() / int(np.prod(x.shape))


def flattened(m, x):
    return m.first(x.view(-1, np.prod(x.shape[1:]))).reshape(np.prod(x.shape)).mean() * np.min(x.shape)


def scaled(m, x):
    """A loss without dims stays one of float32, as NumPy's numbers are Python's to PyTorch."""
    return m.first(x / np.sqrt(x.shape[-1])).sum() / np.sqrt(x.shape[0]) * np.log(2.0) + np.exp(1)


def mapped(m, x):
    h = m.first(x)
    return (h * 2 if sum(map(np.prod, [x.shape, h.shape])) < 1000 else h).sum() / max(map(np.max, [x.shape, h.shape]))


@pytest.mark.parametrize("use", [compared, flattened, scaled, mapped])
def test_numpy_of_sizes_and_numbers(use):
    in_the_engine(trained(use, [(torch.randn(rows, 4),) for rows in (2, 3, 5, 4)]), 4)


def a_cache(m, x):
    """A text of sizes is a key: the table is there, since the script has filled it."""
    key = "rows " + ",".join(f"{sizes}" for sizes in [tuple(x.shape), m.first.weight.shape])
    return (m.first(x) * TABLE[key]).sum()


def texts(m, x):
    parts = "a.b.c".split(".")
    parts.pop(1)
    parts.append(str(x.shape[0]))
    key = "x".join(map(str, x.shape)) + str(tuple(x.shape)) + ".".join(parts)
    return (m.last if key == "2x4(2, 4)a.c.2" else m.first)(m.first(x)).sum()


TABLE = {f"rows ({rows}, 4),torch.Size([4, 4])": float(rows) for rows in range(9)}


@pytest.mark.parametrize("use", [a_cache, texts])
def test_texts_of_sizes(use):
    counts = trained(use, [(torch.randn(rows, 4),) for rows in (2, 3, 2, 3)])
    assert (counts["graph_breaks"], counts["reasons"]) == ([], []) and counts["exports"] <= 2
    assert (counts["engine_steps"], counts["captures"]) == (4, 2)


def test_opt_einsum_is_asked_without_its_thread(monkeypatch):
    """Its contractions ask before each product whether intermediate results are kept, which is a matter of the thread."""
    package, sharing = types.ModuleType("opt_einsum"), types.ModuleType("opt_einsum.sharing")
    package.sharing, sharing._SHARING_STACK = sharing, collections.defaultdict(list)
    sharing.currently_sharing = lambda: threading.get_ident() in sharing._SHARING_STACK
    monkeypatch.setitem(sys.modules, "opt_einsum", package)
    monkeypatch.setitem(sys.modules, "opt_einsum.sharing", sharing)

    def contracted(m, x):
        return torch.einsum("ij,kj->", x, m.first.weight) if not sharing.currently_sharing() else m.last(x).sum()

    in_the_engine(trained(contracted, [(torch.randn(rows, 4),) for rows in (2, 3)]), 2)
    sharing._SHARING_STACK[threading.get_ident()].append({})
    trained(contracted, [(torch.randn(2, 4),)])


def traced_or_not(m, x):
    return m.first(x).sum() if not (torch._C._is_tracing() or torch.jit.is_tracing()) else m.last(x).sum()


def product(x, y):
    return x * y


def refused(m, x):
    for layer in (m.first, m.last):
        try:
            x = layer(x, lengths=None)
        except TypeError as error:
            if not RECENT or str(error) == "Linear.forward() got an unexpected keyword argument 'lengths'":
                x = layer(x)
    try:
        return product(x).sum()
    except TypeError as error:
        return x.sum() * (2.0 if not RECENT or "missing 1 required positional argument: 'y'" in str(error) else 0.0)


@pytest.mark.parametrize("use", [traced_or_not, refused])
def test_no_cut(use):
    in_the_engine(trained(use, [(torch.randn(rows, 4),) for rows in (2, 3, 2)]), 3)


def test_wrong_arguments_that_nothing_catches():
    model = ORTModule(Net(lambda m, x: product(m.first(x))))
    with pytest.raises(TypeError, match=re.escape("product() missing 1 required positional argument: 'y'")):
        model(torch.randn(2, 4))


def reversed_gradient(m, x):
    h = m.first(x).tanh()
    same = h * 1.0
    with torch.no_grad():
        same.register_hook(lambda grad: -0.1 * grad)
    return (m.last(same) + h[:, :2]).square().sum()


def clipped(m, x):
    """It is given the whole gradient: of users before and after it."""
    rows, weight = x.shape[0], x.mean()
    h = m.first(x)
    before = h.square().sum()
    h.register_hook(lambda grad: grad.clamp(-1.0, 1.0) * rows + weight)
    return m.last(h).sum() + before


def of_no_effect(m, x):
    h = m.first(x)
    h.register_hook(lambda grad: None)
    return m.last(h).square().sum()


def two(m, x):
    h = m.first(x)
    h.register_hook(lambda grad: grad * 2)
    h.register_hook(lambda grad: grad + 1)
    return m.last(h).square().sum()


def written(m, x):
    h = m.first(x)
    h.view(-1).mul_(3)
    h.register_hook(lambda grad: grad * grad)
    return m.last(h).square().sum()


def needs_a_user(m, x):
    h = m.first(x)
    scale = (h * 3).mean().detach()
    h.register_hook(lambda grad: grad * scale)
    return m.last(h).square().sum()


def kept(m, x):
    h = m.first(x)
    h.register_hook(lambda grad: m.gradients.append(grad.sum().item()))
    return m.last(h).square().sum()


def test_a_hook_of_a_tensor():
    """Torch calls it within the engine's backward; what a graph cannot keep PyTorch runs, or it is cut."""
    for use in (reversed_gradient, clipped, of_no_effect):
        counts = trained(use, [(torch.randn(rows, 4),) for rows in (2, 3, 2)])
        if HOOKS:
            in_the_engine(counts, 3)
    for use in (two, written, needs_a_user):
        counts = trained(use, [(torch.randn(rows, 4),) for rows in (2, 3)])
        assert counts["reasons"] or not HOOKS


def kept_after_use(m, x):
    """Both parts of the gradient."""
    h = m.first(x)
    before = h * 3
    h.register_hook(lambda grad: m.gradients.append(grad.sum().item()))
    return m.last(h).square().sum() + before.sum()


class Late(Net):
    """Its method gives the hook behind a cut."""

    def forward(self, x):
        h = self.first(x)
        before = h * 3
        torch._dynamo.graph_break()
        self.watch(h)
        return self.last(h).square().sum() + before.sum()

    def watch(self, h):
        h.register_hook(lambda grad: self.gradients.append(grad.sum().item()))


@pytest.mark.parametrize("kind, engine", [(lambda: Net(kept), 3), (lambda: Net(kept_after_use), 0), (lambda: Late(None), 0)])
def test_a_hook_that_keeps_gradients(kind, engine):
    """It sees what eager's sees. PyTorch runs a part that goes on with the tensor ahead of the cut."""
    torch.manual_seed(0)
    eager = kind()
    eager.gradients = []
    model = ORTModule(copy.deepcopy(eager))
    for rows in (2, 3, 2):
        x = torch.randn(rows, 4)
        for module in (eager, model):
            module(x).backward()
    assert model.gradients == pytest.approx(eager.gradients) and len(eager.gradients) == 3
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == engine and len(counts["reasons"]) == (engine == 0)
    assert engine or "gives a tensor a hook" in counts["reasons"][0]


def test_a_hook_of_a_tensor_without_a_gradient():
    model = ORTModule(Net(lambda m, x: (x * 2).register_hook(lambda grad: grad)))
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        model(torch.randn(2, 4))
    model = ORTModule(Net(reversed_gradient))
    model(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="doesn't require gradient"), torch.no_grad():
        model(torch.randn(2, 4))


def test_a_hook_of_a_module():
    """The graph is cut there, the parts run in the engine, and the hook is called once a step."""
    torch.manual_seed(0)
    eager = Net(lambda m, x: m.last(m.first(x)).square().sum())
    eager.first.register_full_backward_hook(lambda module, given, got: module.seen.append(got[0].sum().item()))
    eager.first.seen = []
    model = ORTModule(copy.deepcopy(eager))
    for rows in (2, 3, 2):
        x = torch.randn(rows, 4)
        for module in (eager, model):
            module(x).backward()
    assert model.first.seen == pytest.approx(eager.first.seen) and len(eager.first.seen) == 3
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], len(counts["graph_breaks"])) == (3, 0, 1)


def kept_handle(m, x):
    h = m.first(x)
    m.handle = h.register_hook(lambda grad: grad * 2)
    return m.last(h).square().sum()


def removed_handle(m, x):
    h = m.first(x)
    handle = h.register_hook(lambda grad: grad * 2)
    loss = m.last(h).square().sum()
    handle.remove()
    return loss


@pytest.mark.parametrize("use, line", [(kept_handle, "RemovableHandle"), (removed_handle, "handle.remove()")])
def test_a_function_that_dynamo_leaves_to_python_is_named(use, line):
    """The reason has what ended the capture, and the user's line."""
    counts = trained(use, [(torch.randn(rows, 4),) for rows in (2, 3)])
    if HOOKS:
        assert counts["fallback_steps"] == 2 and line in counts["reasons"][0] and __file__ in counts["reasons"][0]


def checked_equal(m, x, y):
    if not torch.equal(x, y) or y.allclose(x + 1, atol=1e-3):
        raise ValueError(f"{x.shape[0]} rows differ")
    assert x.equal(y), "and here"
    return m.last(m.first(x)).square().sum()


def test_a_check_of_equality():
    """It is in the graph; PyTorch runs a call for which it fails. Without its shape's, every call would be cut."""
    calls = [torch.randn(rows, 4) for rows in (2, 3, 2)]
    counts = trained(checked_equal, [(x, x.clone()) for x in calls])
    if not RECENT:  # which is cut there
        return
    in_the_engine(counts, 3)
    model = ORTModule(Net(checked_equal))
    for _ in range(2):
        model(calls[0], calls[0].clone())
        with pytest.raises(ValueError, match="2 rows differ"):
            model(calls[0], calls[2])
    counts = onnxtrain.stats(model)
    assert (counts["captures"], counts["engine_steps"], counts["fallback_steps"]) == (1, 2, 2)


def chosen_equal(m, x, y):
    m.same = torch.equal(x, y)
    h = m.first(x)
    if torch.allclose(x, y, rtol=0.0, atol=0.5):
        h = h.relu()
    return m.last(h * 2 if m.same else h).square().sum()


def test_a_branch_on_equality():
    """A cut; each way has a graph. What is not a number is not equal, nor are tensors of two shapes."""
    x = torch.randn(3, 4)
    nan = x.clone()
    nan[0, 0] = float("nan")
    calls = [(x, x.clone()), (x, x + 1), (x, x + 0.1), (x, nan)] * 2
    counts = trained(chosen_equal, calls)
    assert (counts["engine_steps"], counts["reasons"]) == (8, []) and counts["graph_breaks"]
    model = ORTModule(Net(chosen_equal))
    for y in (x.clone(), x[:1], x.double() + 1):
        with contextlib.suppress(RuntimeError):  # allclose() does not take two types
            model(x, y)
        assert model.same is torch.equal(x, y)
