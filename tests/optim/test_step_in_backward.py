"""step_in_backward(): every bit as backward and then step() have it, and an exception for what does not fit."""

from __future__ import annotations

import copy
import gc
import os
import sys
import weakref
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from onnx import helper

import onnxtrain
from onnxtrain import _C
from onnxtrain.optim import SGD, Adagrad, FusedAdam, Lamb, Lion, step_in_backward
from onnxtrain.ortmodule import DebugOptions, ORTModule

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "models")]
import random_modules  # noqa: E402
from harness import drawn_seed  # noqa: E402

OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, maximize=True),
    "adam": lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1),
    "adam_int8": lambda p: FusedAdam(p, lr=1e-2, state_dtype="int8"),
    "lamb": lambda p: Lamb(p, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}
WIDE = 300  # a weight of several of the engine's chunks


class Net(nn.Module):
    """An embedding that is also the last product's weight, a matrix used twice, odd sizes, numbers without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 24)
        self.twice, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, WIDE), nn.Linear(WIDE, 24, bias=False)
        self.scale, self.frozen = nn.Parameter(torch.tensor(1.5)), nn.Linear(24, 24)
        self.unused = nn.Linear(3, 3)
        self.wide = nn.Linear(WIDE, WIDE)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.words(tokens)))) + self.frozen(self.words(tokens))
        x = x + self.down(F.gelu(self.wide(F.gelu(self.up(self.norm(x))))))
        return self.scale * x @ self.words.weight.T


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


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, -2).float(), tokens.flatten())


def same(a: nn.Module, b: nn.Module, x: torch.optim.Optimizer, y: torch.optim.Optimizer) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert p._version == q._version, name
    for group, other in zip(x.param_groups, y.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            assert x.state.get(p, {}).keys() == y.state.get(q, {}).keys()
            for key, value in x.state.get(p, {}).items():
                assert torch.equal(value, y.state[q][key]), key


def pair(make, net=Net, join=True):
    """(model, optimizer) with the step in backward, and the same without."""
    torch.manual_seed(0)
    module = net()
    a, b = ORTModule(copy.deepcopy(module)), ORTModule(copy.deepcopy(module))
    x, y = make(a.parameters()), make(b.parameters())
    if join:
        step_in_backward(x, a)
    return a, x, b, y


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


SEED = drawn_seed("ONNXTRAIN_MODELS_SEED")


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
                assert torch.equal(p.nan_to_num(7), q.nan_to_num(7)), f"ONNXTRAIN_MODELS_SEED={seed}"
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
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.both(x)
            return self.one(x), self.other(x)

    a, x, b, y = pair(OPTIMIZERS["adam"], Two)
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
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.left, self.right = (nn.Parameter(torch.randn(6)) for _ in range(3))

        def forward(self, x):
            return x + self.shift, (self.left * self.right).sum()

    a, x, b, y = pair(OPTIMIZERS["momentum"], Odd)
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
        stats = next(iter(a._programs.values()))[0].session.stats()
        held.append(stats["slab_bytes"] + stats["pool_peak_bytes"])
        x.step()
    layer = 128 * 128 * 4
    assert held[1] > 12 * layer and held[0] < 4 * layer


# ---- where the engine leaves a call to PyTorch ----


def test_in_pytorch(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    a, x, b, y = pair(OPTIMIZERS["adam"])
    for _ in range(2):
        tokens = torch.randint(40, (3, 7))
        for model, optimizer in ((a, x), (b, y)):
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
            assert model.up.weight.grad is not None
            optimizer.step()
        same(a, b, x, y)
    assert onnxtrain.stats(a)["fallback_steps"] == 2


class Doubled(torch.autograd.Function):
    """A function that the engine calls back, between two pieces of the graph."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_graph_in_pieces():
    class Pieces(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            return self.first(Doubled.apply(self.first(x)))

    a, x, b, y = pair(OPTIMIZERS["adam"], Pieces)
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
    tokens = torch.randint(40, (3, 7))
    for model, optimizer in ((a, x), (b, y)):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        assert model.up.weight.grad is not None
        optimizer.step()
    same(a, b, x, y)
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


# ---- the core's calls ----


@pytest.fixture
def opened():
    """A run of y = (x w + b) u, the parameters w, b, u of an Updater, and what its backward() takes besides."""
    shape = [3, 3]
    node, value = helper.make_node, lambda name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
    nodes = [node("MatMul", ["x", "w"], ["p"]), node("Add", ["p", "b"], ["s"]), node("MatMul", ["s", "u"], ["y"])]
    graph = helper.make_graph(nodes, "g", [value(name) for name in "xwbu"], [value("y")])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    x, *params = [torch.randn(3, 3) for _ in range(4)]
    optimizer = SGD([nn.Parameter(p) for p in params], lr=0.5)
    params = optimizer.param_groups[0]["params"]
    tensors = [x, *[p.detach() for p in params]]

    def run(mask=b"\0\2\2\1"):
        (y,), opened = session.forward(tensors, mask)
        return opened, [tensors[i] for i in opened.saved_inputs], [torch.ones(3, 3)]

    def backward(run, targets, done=None):
        done = bytearray(len(targets)) if done is None else done
        found = _C.Updater("sgd", "SGD").backward(*run, optimizer.param_groups, optimizer._hypers(), optimizer.state,
                                                  optimizer._prepare, 0, targets, done)
        return found, done

    return run, backward, tensors, params


def test_core_applies_targets_alone(opened):
    run, backward, (x, w, b, u), params = opened
    before = w.clone(), b.clone(), u.clone()
    assert set(run()[0].applied) == {1, 2} and run(b"\0\1\1\1")[0].applied == ()
    found, done = backward(run(), [(1, 0, params[0])])
    grad = torch.ones(3, 3) @ before[2].T
    torch.testing.assert_close(w, before[0] - 0.5 * x.T @ grad)
    assert torch.equal(b, before[1]) and torch.equal(u, before[2]) and done == b"\1"
    assert [f is None for f in found] == [True, True, True, False]


def test_core_refuses_targets(opened):
    run, backward, tensors, params = opened
    before = [t.clone() for t in tensors]
    for targets, error, match in (
            ([(3, 2, params[2])], ValueError, "input 3 is none"), ([(9, 0, params[0])], ValueError, "input 9"),
            ([(-1, 0, params[0])], ValueError, "input -1"), ([(1, -1, params[0])], ValueError, "input 1"),
            ([(1, 0, params[0]), (1, 1, params[1])], ValueError, "input 1"),
            ([(1, 0, params[0]), (2, 0, params[0])], ValueError, "position 0 comes twice"),
            ([(1, 1, params[0])], RuntimeError, "not the one that forward read"),
            ([(1, 7, params[0])], RuntimeError, "lost a parameter"),
            ([(1, 2)], TypeError, None), ([3], TypeError, None)):
        with pytest.raises(error, match=match):
            backward(run(), targets)
    with pytest.raises(TypeError, match="a byte per target"):
        backward(run(), [(1, 0, params[0])], bytearray())
    with pytest.raises(TypeError, match="a Run is expected"):
        backward((3, [], []), [])
    opened_run, saved, grads = run()
    with pytest.raises(ValueError, match="nobody takes the gradients"):
        opened_run.backward(saved, grads)
    with pytest.raises(RuntimeError, match="already called"):
        backward((opened_run, saved, grads), [])
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


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
    with pytest.raises(RuntimeError, match="ask for some gradients"):
        torch.autograd.grad(loss, [model.up.weight])
    untouched(model, optimizer, loss_of(model, tokens), RuntimeError, "ask for some", inputs=[model.up.weight])
    untouched(model, optimizer, loss_of(model, tokens), RuntimeError, "create_graph", create_graph=True)


def test_parameter_used_outside(joined):
    model, optimizer, tokens = joined
    (loss_of(model, tokens) + model.norm.bias.sum()).backward()
    with pytest.raises(RuntimeError, match="norm.bias have a further gradient from outside"):
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
    with pytest.raises(RuntimeError, match="other hyperparameters"):
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
    untouched(model, optimizer, loss_of(model, tokens), RuntimeError, "up.weight wants gradients of another dtype")


def test_memory_that_backward_reads():
    """The module's input is the parameter's memory: whether updated before or after it is read would decide."""
    torch.manual_seed(0)
    model = ORTModule(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    optimizer = SGD(model.parameters(), lr=0.1)
    step_in_backward(optimizer, model)
    loss = model(torch.from_numpy(model.get_parameter("1.weight").detach().numpy())).square().sum()
    untouched(model, optimizer, loss, ValueError, "shares memory with the parameter number 2")


def test_parameters_that_share_memory():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.Parameter(torch.randn(4, 4))
            self.part = nn.Parameter(self.all.detach()[1])

        def forward(self, x):
            return x @ self.all + self.part

    model = ORTModule(Views())
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
    with pytest.raises(ValueError, match="has an optimizer already"):
        step_in_backward(SGD(model.parameters()), model)


def test_distributed(joined, monkeypatch):
    model, optimizer, tokens = joined
    loss = loss_of(model, tokens)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    untouched(model, optimizer, loss, RuntimeError, "torch.distributed")
    with pytest.raises(RuntimeError, match="torch.distributed"):
        step_in_backward(SGD(model.parameters()), ORTModule(model.module))


def test_failure_in_the_middle():
    """An index that is not there any more stops the embedding's gradient, when the layers above have been updated."""
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.fc, self.out = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10)

        def forward(self, tokens):
            return self.out(torch.tanh(self.fc(self.words(tokens))))

    a, x, b, y = pair(OPTIMIZERS["adam"], Table)
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
