"""step_in_backward(): every bit as backward and then step() have it. Refusals: test_step_in_backward_refused.py."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from functions import Doubled
from in_backward import OPTIMIZERS, Net, Parts, loss_of, pair, same

import onnxtrain
from onnxtrain import _C
from onnxtrain.optim import SGD, FusedAdam, step_in_backward
from onnxtrain.ortmodule import DebugOptions, ORTModule

TESTS = Path(__file__).resolve().parents[1]
import random_modules
from seeds import drawn_seed


class Images(nn.Module):
    """Weights in channels-last and transposed order, BatchNorm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 36, 40)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.out.weight.data = self.out.weight.data.T.contiguous().T

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = (tokens.float().reshape(-1, 1, 1, 1) / 40).expand(-1, 3, 6, 6) * torch.linspace(0, 1, 6)
        return self.out(F.dropout(F.relu(self.norm(self.conv(x))), 0.3).flatten(1))


def applied(model, optimizer) -> int:
    """How many parameters an unclosed backward has updated; none of them has a gradient."""
    assert all(p.grad is None for p in model.parameters())
    return len(optimizer._in_backward.updated)


def train(a, x, b, y, steps=4, loss=loss_of, shape=(3, 7), between=None):
    """The same steps for both, compared after each."""
    for step in range(steps):
        tokens = torch.randint(40, shape)
        for model, optimizer in ((a, x), (b, y)):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss(model, tokens).backward()
            if model is a:
                count = applied(model, optimizer)
                assert count > 0
            optimizer.step()
            if between is not None:
                between(optimizer, step)
        same(a, b, x, y)
    for model in (a, b):
        counts = onnxtrain.stats(model)
        assert counts["fallback_steps"] == 0, counts["reasons"]
    return count


# ---- every bit the same ----


@pytest.mark.parametrize("net", [Net, Images])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits(name, net):
    train(*pair(OPTIMIZERS[name], net), shape=(4, 5) if net is Net else (8,))


@pytest.mark.parametrize("threads", [2, 5])
def test_same_bits_with_threads(threads):
    torch.set_num_threads(threads)
    try:
        train(*pair(OPTIMIZERS["lamb"]))
    finally:
        torch.set_num_threads(1)


SEED = drawn_seed()


@pytest.mark.parametrize("index", range(100 if os.environ.get("ONNXTRAIN_SLOW") else 4))
def test_same_bits_of_random_modules(monkeypatch, index):
    seed = SEED + index
    module = random_modules.RandomModule(seed)
    if not any(p.requires_grad for p in module.parameters()):
        return
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", str(seed % 2))
    _C.recompute_everywhere(seed % 3 == 0)
    _C.disable_passes(["fuse_elementwise", "cse"] if seed % 5 == 0 else [])
    try:
        a, x, b, y = pair(list(OPTIMIZERS.values())[seed % len(OPTIMIZERS)], lambda: module)
        for step in range(3):
            arguments = [a.roll(step, 0) * (1 + 0.1 * step) for a in module.arguments]
            for model, optimizer in ((a, x), (b, y)):
                generator = torch.Generator().manual_seed(step)
                results = model(*arguments)
                results = [results] if isinstance(results, torch.Tensor) else results
                loss = sum((r * torch.randn(r.shape, generator=generator)).sum() for r in results)
                optimizer.zero_grad()
                if loss.requires_grad:
                    loss.backward()
                optimizer.step()
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                assert torch.equal(p.nan_to_num(7), q.nan_to_num(7)), f"random module {seed}"
    finally:
        _C.recompute_everywhere(False)
        _C.disable_passes([])


def test_verified_against_eager():
    """The first step is compared with eager PyTorch, which takes a backward of its own."""
    torch.manual_seed(0)
    module = Net()
    a, b = ORTModule(copy.deepcopy(module), DebugOptions(verify=True)), ORTModule(copy.deepcopy(module))
    x, y = OPTIMIZERS["adam"](a.parameters()), OPTIMIZERS["adam"](b.parameters())
    step_in_backward(x, a)
    train(a, x, b, y, steps=2)


def test_every_parameter_with_a_gradient_is_updated():
    a, x, b, y = pair(OPTIMIZERS["adam"])
    wanted = sum(p.requires_grad for p in a.parameters()) - 2  # `unused` has none
    assert train(a, x, b, y) == wanted
    assert len(x.state) == wanted


@pytest.mark.parametrize("options", [{"master_weights": True}, {"stochastic_rounding": True}, {}])
def test_narrow_parameters(options):
    train(*pair(lambda p: FusedAdam(p, lr=1e-2, **options), lambda: Net().bfloat16()))


def test_double_parameters():
    train(*pair(OPTIMIZERS["adam"], lambda: Net().double()))


def test_autocast():
    def loss(model, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, tokens)

    train(*pair(OPTIMIZERS["adam"]), loss=loss)


@pytest.mark.parametrize("name", ["ORTMODULE_MEMORY_OPT_LEVEL", "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT"])
def test_memory_options(monkeypatch, name):
    """The first has products of backward read parameters again, some of them after their gradient is there."""
    monkeypatch.setenv(name, "1")
    _C.recompute_everywhere(True)
    try:
        train(*pair(OPTIMIZERS["momentum"]))
    finally:
        _C.recompute_everywhere(False)


@pytest.mark.parametrize("disabled", ["fuse_elementwise,cse", "fuse_gradients,fuse_gemm,recompute", "fuse_transpose"])
def test_without_passes(disabled):
    """Other nodes, and another order of them."""
    _C.disable_passes(disabled.split(","))
    try:
        train(*pair(OPTIMIZERS["momentum"]))
    finally:
        _C.disable_passes([])


def test_denormals():
    """Steps of the engine flush them; the optimizer's arithmetic does not."""
    def loss(model, tokens):
        return loss_of(model, tokens) * 1e-18

    a, x, b, y = pair(lambda p: FusedAdam(p, lr=1e-2, eps=1e-30))
    train(a, x, b, y, loss=loss)
    tiny = torch.finfo(torch.float32).tiny
    squares = torch.cat([s["exp_avg_sq"].flatten() for s in x.state.values()])
    assert ((squares > 0) & (squares < tiny)).any()


def test_groups_and_scheduler():
    def make(params):
        params = list(params)
        return SGD([{"params": params[::2], "lr": 0.3}, {"params": params[1::2], "momentum": 0.9, "maximize": True}],
                   lr=0.1)

    a, x, b, y = pair(make)
    schedulers = {id(o): torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (x, y)}
    train(a, x, b, y, between=lambda optimizer, step: schedulers[id(optimizer)].step())
    assert [g["lr"] for g in x.param_groups] == [0.3 / 16, 0.1 / 16]


def test_rate_that_is_a_tensor():
    a, x, b, y = pair(lambda p: FusedAdam(p, lr=torch.tensor(0.1)))
    train(a, x, b, y, between=lambda optimizer, step: optimizer.param_groups[0]["lr"].mul_(0.5))


def test_closure():
    a, x, b, y = pair(OPTIMIZERS["adam"])
    tokens = torch.randint(40, (3, 7))
    for _ in range(3):
        losses = []
        for model, optimizer in ((a, x), (b, y)):
            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(model, tokens)
                loss.backward()
                return loss
            losses.append(optimizer.step(closure))
        assert torch.equal(*losses)
        same(a, b, x, y)


def test_some_outputs_without_a_gradient():
    """What only they depend on is not updated: a gradient of zero would decay it, and count a step."""
    def use(m, x):
        x = m.both(x)
        return m.one(x), m.other(x)

    a, x, b, y = pair(OPTIMIZERS["adam"], lambda: Parts(use, both=nn.Linear(4, 4), one=nn.Linear(4, 4),
                                                        other=nn.Linear(4, 4)))
    for step in range(4):
        batch = torch.randn(3, 4)
        for model, optimizer in ((a, x), (b, y)):
            model(batch)[step % 2].square().mean().backward()
            assert model is b or applied(model, optimizer) == 4
            optimizer.step()
            optimizer.zero_grad()
        same(a, b, x, y)
    assert {float(s["step"]) for s in x.state.values()} == {2.0, 4.0}


def test_gradients_that_are_inputs_or_each_other():
    """The gradient of `shift` is the caller's own tensor, that of either factor the other factor."""
    def odd():
        return Parts(lambda m, x: (x + m.shift, (m.left * m.right).sum()),
                     **{name: nn.Parameter(torch.randn(6)) for name in ("shift", "left", "right")})

    a, x, b, y = pair(OPTIMIZERS["momentum"], odd)
    for _ in range(3):
        batch, seed = torch.randn(6), torch.randn(6)
        for model, optimizer in ((a, x), (b, y)):
            optimizer.zero_grad()
            first, second = model(batch)
            torch.autograd.backward([first, second], [seed, torch.ones(())])
            optimizer.step()
        same(a, b, x, y)


def test_other_parameters_have_gradients():
    """A part outside the module, which step() updates; and a parameter of the module that the optimizer has not."""
    torch.manual_seed(0)
    nets, results = [Net(), nn.Linear(40, 40)], []
    for join in (True, False):
        model, head = ORTModule(copy.deepcopy(nets[0])), copy.deepcopy(nets[1])
        foreign = model.scale
        optimizer = FusedAdam([*(p for p in model.parameters() if p is not foreign), *head.parameters()], lr=1e-2)
        if join:
            step_in_backward(optimizer, model)
        for step in range(3):
            torch.manual_seed(step)
            tokens = torch.randint(40, (3, 7))
            optimizer.zero_grad()
            foreign.grad = None
            F.cross_entropy(head(model(tokens)).flatten(0, 1), tokens.flatten()).backward()
            assert foreign.grad is not None and head.weight.grad is not None
            assert not join or model.up.weight.grad is None
            optimizer.step()
        results.append([*model.parameters(), *head.parameters(), foreign.grad])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_two_models_of_one_optimizer():
    torch.manual_seed(0)
    nets, results = [nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())], []
    for join in (True, False):
        models = [ORTModule(copy.deepcopy(net)) for net in nets]
        optimizer = FusedAdam([p for model in models for p in model.parameters()], lr=1e-2)
        handles = [step_in_backward(optimizer, model) for model in models] if join else []
        for step in range(3):
            torch.manual_seed(step)
            models[1](models[0](torch.randn(5, 6))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p for model in models for p in model.parameters()])
        for handle in handles:
            handle.remove()
        assert optimizer._in_backward is None
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_gradients_do_not_exist_at_once():
    def deep():
        return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.Tanh())))

    held = []
    for join in (True, False):
        a, x, _, _ = pair(OPTIMIZERS["sgd"], deep, join)
        a(torch.randn(4, 128)).square().mean().backward()
        stats = a._all_programs()[0][1][0].session.stats()
        held.append(stats["slab_bytes"] + stats["pool_peak_bytes"])
        x.step()
    layer = 128 * 128 * 4
    assert held[1] > 12 * layer and held[0] < 4 * layer


# ---- where the engine leaves a call to PyTorch ----


def plain_step(a, x, b, y):
    """A step of both whose gradients exist, as step() makes the update."""
    tokens = torch.randint(40, (3, 7))
    for model, optimizer in ((a, x), (b, y)):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        assert model.up.weight.grad is not None
        optimizer.step()
    same(a, b, x, y)


def test_in_pytorch(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    a, x, b, y = pair(OPTIMIZERS["adam"])
    for _ in range(2):
        plain_step(a, x, b, y)
    assert onnxtrain.stats(a)["fallback_steps"] == 2


def test_graph_in_pieces():
    def pieces():
        return Parts(lambda m, x: m.first(Doubled.apply(m.first(x))), first=nn.Linear(4, 4))

    a, x, b, y = pair(OPTIMIZERS["adam"], pieces)
    for _ in range(2):
        batch = torch.randn(3, 4)
        for model, optimizer in ((a, x), (b, y)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            assert model.first.weight.grad is not None
            optimizer.step()
        same(a, b, x, y)


def test_evaluation_and_other_sizes_between():
    a, x, b, y = pair(OPTIMIZERS["adam"])
    train(a, x, b, y, steps=1)
    with torch.no_grad():
        assert torch.equal(a(torch.zeros(1, 2, dtype=torch.long)), b(torch.zeros(1, 2, dtype=torch.long)))
    train(a, x, b, y, steps=2, shape=(2, 9))


def test_remove():
    a, x, b, y = pair(OPTIMIZERS["adam"], join=False)
    handle = step_in_backward(x, a)
    train(a, x, b, y, steps=1)
    handle.remove()
    plain_step(a, x, b, y)
    x.zero_grad()
    step_in_backward(x, a)


def test_dead_optimizer():
    a, x, _, _ = pair(OPTIMIZERS["adam"])
    alive = weakref.ref(x)
    loss_of(a, torch.randint(40, (3, 7))).backward()
    x.step()
    del x
    gc.collect()
    assert alive() is None
    loss_of(a, torch.randint(40, (3, 7))).backward()
    assert a.up.weight.grad is not None


def test_copies_are_on_their_own():
    a, x, _, _ = pair(OPTIMIZERS["adam"])
    model = copy.deepcopy(a)
    loss_of(model, torch.randint(40, (3, 7))).backward()
    assert model.up.weight.grad is not None and not x._in_backward.updated
    assert copy.deepcopy(x)._in_backward is None


def test_state_dict_goes_on():
    a, x, b, y = pair(OPTIMIZERS["adam"])
    train(a, x, b, y, steps=2)
    x.load_state_dict(copy.deepcopy(y.state_dict()))
    train(a, x, b, y, steps=2)
