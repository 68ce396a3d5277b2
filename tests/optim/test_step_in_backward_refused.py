"""What step_in_backward() refuses, and what stays of a step that fails."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from in_backward import OPTIMIZERS, Parts, loss_of, pair, same

import onnxtrain
from onnxtrain import _C
from onnxtrain.optim import SGD, FusedAdam, step_in_backward
from onnxtrain.ortmodule import ORTModule

# ---- refused ----


@pytest.fixture
def joined():
    a, x, _, _ = pair(OPTIMIZERS["adam"])
    return a, x, torch.randint(40, (3, 7))


def untouched(model, optimizer, loss, error, match, **arguments):
    """backward() raises, and nothing has changed; a later step works."""
    before = [p.detach().clone() for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    states = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=match):
        loss.backward(**arguments)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert versions == [p._version for p in model.parameters()]
    after = optimizer.state_dict()
    assert after["state"].keys() == states["state"].keys()


def test_second_backward(joined):
    model, optimizer, tokens = joined
    losses = [loss_of(model, tokens), loss_of(model, tokens)]
    losses[0].backward()
    untouched(model, optimizer, losses[1], RuntimeError, "cannot be accumulated")
    untouched(model, optimizer, loss_of(model, tokens), RuntimeError, "cannot be accumulated")
    optimizer.step()
    loss_of(model, tokens).backward()
    optimizer.step()


def test_two_calls_in_one_loss(joined):
    model, _, tokens = joined
    with pytest.raises(RuntimeError, match="several calls of the module"):
        (loss_of(model, tokens) + loss_of(model, tokens)).backward()


def test_retained_graph(joined):
    model, optimizer, tokens = joined
    loss = loss_of(model, tokens)
    loss.backward(retain_graph=True)
    optimizer.step()
    untouched(model, optimizer, loss, RuntimeError, "already|modified by an inplace")


def test_gradient_that_is_there(joined):
    model, optimizer, tokens = joined
    model.down.weight.grad = torch.ones_like(model.down.weight)
    untouched(model, optimizer, loss_of(model, tokens), RuntimeError, "zero_grad")
    optimizer.zero_grad()
    loss_of(model, tokens).backward()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks(joined, register):
    model, optimizer, tokens = joined
    loss = loss_of(model, tokens)
    handle = getattr(model.up.weight, register)(lambda grad: None)
    untouched(model, optimizer, loss, RuntimeError, "up.weight has a hook")
    handle.remove()
    loss_of(model, tokens).backward()


def test_hook_before_the_step(joined):
    model, optimizer, tokens = joined
    optimizer.register_step_pre_hook(lambda *args: None)
    untouched(model, optimizer, loss_of(model, tokens), RuntimeError, "hooks that run before step")


@pytest.mark.filterwarnings("ignore:Using backward")
def test_some_gradients_only(joined):
    model, optimizer, tokens = joined
    loss = loss_of(model, tokens)
    with pytest.raises(RuntimeError, match="does not ask for the gradient of"):
        torch.autograd.grad(loss, [model.up.weight])
    untouched(model, optimizer, loss_of(model, tokens), RuntimeError, "does not ask for", inputs=[model.up.weight])
    untouched(model, optimizer, loss_of(model, tokens), RuntimeError, "create_graph", create_graph=True)


def test_parameter_used_outside(joined):
    model, optimizer, tokens = joined
    (loss_of(model, tokens) + model.norm.bias.sum()).backward()
    with pytest.raises(RuntimeError, match="norm.bias received another gradient after that, from outside"):
        optimizer.step()


def test_parameter_used_in_two_modules(joined):
    model, optimizer, tokens = joined
    other = ORTModule(model.norm)
    step_in_backward(optimizer, other)
    with pytest.raises(RuntimeError, match="cannot be accumulated|modified by an inplace"):
        (loss_of(model, tokens) + other(torch.randn(3, 24)).square().sum()).backward()


def test_clipping():
    a, _, _, _ = pair(OPTIMIZERS["adam"], join=False)
    with pytest.raises(ValueError, match="max_grad_norm"):
        step_in_backward(FusedAdam(a.parameters(), max_grad_norm=1.0), a)
    optimizer = FusedAdam(a.parameters())
    step_in_backward(optimizer, a)
    optimizer.max_grad_norm = 1.0
    untouched(a, optimizer, loss_of(a, torch.randint(40, (3, 7))), RuntimeError, "max_grad_norm")


def test_several_devices():
    module = nn.Linear(2, 2)
    module.there = nn.Parameter(torch.empty(2, device="meta"))
    model = ORTModule(module)
    with pytest.raises(ValueError, match="on one CUDA device: .*there on meta"):
        step_in_backward(SGD(model.parameters(), lr=0.1), model)


def test_clipping_by_hand(joined):
    model, optimizer, tokens = joined
    loss_of(model, tokens).backward()
    with pytest.raises(RuntimeError, match="finds no gradients"):
        onnxtrain.optim.clip_grad_norm_(model.parameters(), 1.0)
    assert not onnxtrain.optim.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0)
    optimizer.step()
    assert not onnxtrain.optim.clip_grad_norm_(model.parameters(), 1.0)


def test_grad_scaler(joined):
    model, optimizer, tokens = joined
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, tokens)).backward()
    with pytest.raises((RuntimeError, AssertionError), match="GradScaler|No inf checks"):
        scaler.step(optimizer)
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)
    optimizer.step()  # with the scaled gradients that backward has applied
    optimizer.grad_scale = torch.tensor(2.0)
    loss_of(model, tokens).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        optimizer.step()


def test_rate_changed_behind_backward(joined):
    model, optimizer, tokens = joined
    loss_of(model, tokens).backward()
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="hyperparameters have changed since: change them after step"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def test_between_backward_and_step(joined):
    model, optimizer, tokens = joined
    saved = copy.deepcopy(optimizer.state_dict())
    loss_of(model, tokens).backward()
    for call in (optimizer.zero_grad, lambda: optimizer.load_state_dict(saved),
                 optimizer._in_backward.handles[0].remove):
        with pytest.raises(RuntimeError, match="call step\\(\\) first"):
            call()
    optimizer.step()
    optimizer.zero_grad()


def test_weight_that_changed(joined):
    model, optimizer, tokens = joined
    loss = loss_of(model, tokens)
    with torch.no_grad():
        model.up.weight.mul_(2)
    untouched(model, optimizer, loss, RuntimeError, "modified by an inplace operation")


def test_parameter_replaced(joined):
    model, optimizer, tokens = joined
    loss = loss_of(model, tokens)
    params = optimizer.param_groups[0]["params"]
    at = next(i for i, p in enumerate(params) if p is model.up.bias)
    params[at] = nn.Parameter(model.up.bias.detach().clone())
    untouched(model, optimizer, loss, RuntimeError, "is not the one that forward read")


def test_parameter_frozen_meanwhile():
    a, x, b, y = pair(OPTIMIZERS["adam"])
    tokens = torch.randint(40, (3, 7))
    for model, optimizer in ((a, x), (b, y)):
        loss = loss_of(model, tokens)
        model.up.weight.requires_grad_(False)
        loss.backward()
        optimizer.step()
    assert a.up.weight not in x.state
    same(a, b, x, y)


def test_gradients_of_another_dtype(joined):
    model, optimizer, tokens = joined
    model.up.weight.grad_dtype = torch.float64
    untouched(model, optimizer, loss_of(model, tokens), RuntimeError,
              "up.weight has a grad_dtype that is not its own dtype")


def test_memory_that_backward_reads():
    """The module's input is the parameter's memory: whether updated before or after it is read would decide."""
    torch.manual_seed(0)
    model = ORTModule(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    optimizer = SGD(model.parameters(), lr=0.1)
    step_in_backward(optimizer, model)
    loss = model(torch.from_numpy(model.get_parameter("1.weight").detach().numpy())).square().sum()
    untouched(model, optimizer, loss, ValueError, "shares memory with the parameter number 2")


def test_parameters_that_share_memory():
    whole = nn.Parameter(torch.randn(4, 4))
    row = nn.Parameter(whole.detach()[1])
    model = ORTModule(Parts(lambda m, x: x @ m.whole + m.row, whole=whole, row=row))
    optimizer = SGD(model.parameters(), lr=0.1)
    step_in_backward(optimizer, model)
    untouched(model, optimizer, model(torch.randn(2, 4)).square().sum(), ValueError, "shares memory")


def test_optimizers_and_models():
    model = ORTModule(nn.Linear(2, 2))

    class Own(FusedAdam):
        def step(self, closure=None):
            return super().step(closure)

    for optimizer, match in ((torch.optim.SGD(model.parameters()), "not SGD"), (Own(model.parameters()), "own")):
        with pytest.raises(TypeError, match=match):
            step_in_backward(optimizer, model)
    with pytest.raises(TypeError, match="not Linear"):
        step_in_backward(SGD(model.parameters()), model.module)
    with pytest.raises(ValueError, match="holds no parameter"):
        step_in_backward(SGD(nn.Linear(2, 2).parameters()), model)
    step_in_backward(SGD(model.parameters()), model)
    with pytest.raises(ValueError, match="already has an optimizer"):
        step_in_backward(SGD(model.parameters()), model)


def test_distributed(joined, monkeypatch):
    model, optimizer, tokens = joined
    loss = loss_of(model, tokens)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    untouched(model, optimizer, loss, RuntimeError, "torch.distributed")
    with pytest.raises(RuntimeError, match="torch.distributed"):
        step_in_backward(SGD(model.parameters()), ORTModule(model.module))


# ---- failures ----


def test_failure_in_the_middle():
    """An index that is not there any more stops the embedding's gradient, when the layers above have been updated."""
    def table():
        return Parts(lambda m, x: m.out(torch.tanh(m.fc(m.words(x)))), words=nn.Embedding(10, 4), fc=nn.Linear(4, 4),
                     out=nn.Linear(4, 10))

    a, x, b, y = pair(OPTIMIZERS["adam"], table)
    tokens = torch.tensor([1, 2, 3])
    loss_of(a, tokens).backward()
    x.step()
    loss_of(b, tokens).backward()
    y.step()
    loss = F.cross_entropy(a(tokens), torch.tensor([1, 2, 3]))
    memory = tokens.numpy()
    memory[1] = 10**6
    with pytest.raises(Exception) as caught:
        loss.backward()
    memory[1] = 2
    (note,) = caught.value.__notes__
    assert note.startswith("4 of 5 parameters") and "fc.weight" in note and "words" not in note
    y.zero_grad()
    loss_of(b, tokens).backward()
    b.words.weight.grad = None
    with pytest.raises(RuntimeError, match="step\\(\\) was not called since"):
        loss_of(a, tokens).backward()
    x.step()
    y.step()
    same(a, b, x, y)


def fail_everywhere(model, optimizer):
    """Backward with the next allocation failing, then the one after that, until none does; the blocks held then."""
    for at in range(400):
        optimizer.state.clear()
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(torch.randn(2, 5)).square().mean()
        _C.fail_allocation_after(at)
        try:
            loss.backward()
            fired = _C.fail_allocation_after(-1)
        except MemoryError as error:
            fired = _C.fail_allocation_after(-1)
            note = getattr(error, "__notes__", [""])[0]
            changed = [n for (n, p), q in zip(model.named_parameters(), before) if not torch.equal(p, q)]
            assert all(n in note for n in changed) and len(optimizer.state) == len(changed)
        optimizer.step()
        for p, q in zip(model.parameters(), before):
            assert fired or not torch.equal(p, q)
            p.data.copy_(q)
        if not fired:
            assert at > 5
            del loss
            gc.collect()
            return _C.live_blocks()
    raise AssertionError("it never succeeds")


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_failing_allocations(name):
    """Wherever memory ends, a parameter is as before or whole, the exception's note says which, and nothing leaks."""
    model, optimizer, _, _ = pair(OPTIMIZERS[name], lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    first = fail_everywhere(model, optimizer)
    assert fail_everywhere(model, optimizer) == first
