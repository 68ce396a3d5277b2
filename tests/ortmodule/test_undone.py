"""An export leaves the module, its hooks and every object that it leads to as they were; what forward does to them
happens as in eager PyTorch, or the module runs there, by name.
"""

import collections
import copy
import functools
import random

import numpy as np
import pytest
import torch
import torch.nn as nn
from agree import RECENT
from structure import fakes, structure

import onnxtrain
import onnxtrain.export
from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException
from onnxtrain.ortmodule._runner import GraphRunner


class Box:
    def __init__(self, **values):
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("calls", "last")

    def __init__(self):
        self.calls = 0


class Frozen(collections.OrderedDict):
    """As diffusers has its configurations."""

    def __init__(self, **values):
        super().__init__(**values)
        for name, value in values.items():
            setattr(self, name, value)

    def refuse(self, *_args, **_kwargs):
        raise RuntimeError("frozen")

    __delitem__ = setdefault = pop = update = clear = __setattr__ = refuse

    def __setitem__(self, key, value):
        if key in self:
            self.refuse()
        super().__setitem__(key, value)

    def __setattr__(self, name, value):
        if name in self.__dict__:
            self.refuse()
        super().__setattr__(name, value)


class Base(nn.Module):
    kept = {}

    def __init__(self, use, **parts):
        super().__init__()
        self.fc, self.use = nn.Linear(4, 4), use
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.use(self, self.fc(x))


def of(use, **parts):
    """A module whose forward is `use`, with these parts, made anew for each copy."""
    return lambda: Base(use, **{name: part() for name, part in parts.items()})


def counted(m, h):
    m.meter.calls += 1
    return h * m.meter.calls


def appended(m, h):
    m.window.append(h.detach())
    return h + sum(m.window)


def in_a_dict(m, h):
    m.log["acts"].append(h.detach())
    return h + len(m.log["acts"])


def slotted(m, h):
    m.slots.calls += 1
    m.slots.last = h.detach()
    return h * m.slots.calls


def counting():
    calls = 0

    def use(m, h):
        nonlocal calls
        calls += 1
        return h * calls

    return Base(use)


def histogram(m, h):
    m.seen[h.shape[0] % 3] += 1
    return h * float(m.seen.sum())


def mutable_default(m, h, calls=[0]):  # noqa: B006
    calls[0] += 1
    return h + 0 * calls[0]


def outside(m, h):
    m.hidden[0].last = h.detach()
    return m.hidden[0](h)


def by_name(m, h):
    m.__dict__["last"] = h.detach()
    return h


def leaves_a_loss(m, h):
    m.collector.loss = h.square().mean()
    return h


def from_random(m, h):
    return h * m.rng.random()


def from_numpy(m, h):
    return h * float(m.rng.standard_normal())


EVERY_CALL = {
    "counter of an object": of(counted, meter=lambda: Box(calls=0)),
    "deque": of(appended, window=lambda: collections.deque(maxlen=2)),
    "list in a dict": of(in_a_dict, log=lambda: {"acts": []}),
    "slots": of(slotted, slots=Slotted),
    "variable of a closure": counting,
    "array": of(histogram, seen=lambda: np.zeros(3)),
    "default argument": of(mutable_default),
    "module outside of the tree": of(outside, hidden=lambda: [nn.Tanh()]),
    "past torch's assignment": of(by_name),
    "loss of a collector": of(leaves_a_loss, collector=Box),
    "generator of Python": of(from_random, rng=lambda: random.Random(0)),
    "generator of NumPy": of(from_numpy, rng=lambda: np.random.default_rng(0)),
    "old generator of NumPy": of(from_numpy, rng=lambda: np.random.RandomState(0)),
}


UNGUARDED = pytest.mark.xfail(not RECENT, strict=True, reason="no guard in torch 2.10 (docs/capture.md)")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[UNGUARDED] * (name == "variable of a closure"))
                                  for name in EVERY_CALL])
def test_what_changes_at_every_call_changes_as_in_eager(name):
    torch.manual_seed(0)
    eager = EVERY_CALL[name]()
    torch.manual_seed(0)
    model = ORTModule(EVERY_CALL[name]())
    for _ in range(4):
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), eager(x))
        assert not fakes(model.module)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] + counts["fallback_steps"] == 4


class Rotary:
    def __init__(self):
        self.cache = {}

    def get(self, n):
        if n not in self.cache:
            self.cache[n] = torch.arange(n).float().sin()[:, None]
        return self.cache[n]


def rotary(m, h):
    return h + m.rotary.get(int(h.shape[0]))


def on_the_class(m, h):
    if "table" not in m.kept:
        type(m).kept["table"] = torch.arange(4).float()
    return h * m.kept["table"]


COLLECTED = [None]  # one list of the process, as a context variable


def collecting_hook():
    def hook(_module, _args, output):
        if COLLECTED[0] is not None:
            COLLECTED[0].append(output)

    return hook


class Collecting(nn.Module):
    """As transformers records hidden states: hooks made at the first call, noted in an attribute."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x, collect=False):
        if collect and not getattr(self, "hooked", False):
            for layer in self.layers:
                layer.register_forward_hook(collecting_hook())
            self.hooked = True
        COLLECTED[0] = [] if collect else None
        for layer in self.layers:
            x = layer(x).tanh()
        states, COLLECTED[0] = COLLECTED[0] or (), None
        return x, tuple(states)


def cached():
    @functools.lru_cache
    def table(n):
        return torch.arange(float(n))

    return Base(lambda m, h: h * table(4))


FIRST_CALL = {
    "cache of a helper": of(rotary, rotary=Rotary),
    "cache of a class": of(on_the_class),
    "lru_cache": cached,
}


@pytest.mark.parametrize("name", FIRST_CALL)
def test_what_changes_at_the_first_call_is_set_up(name):
    torch.manual_seed(0)
    Base.kept.clear()
    model, x = ORTModule(FIRST_CALL[name]()), torch.randn(3, 4)
    for _ in range(3):
        ours = model(x)
        ours.sum().backward()
        assert not fakes(model.module) and not fakes(Base.kept)
        torch.testing.assert_close(ours, model.module(x))
    assert onnxtrain.stats(model)["engine_steps"] == 3
    Base.kept.clear()


def test_hooks_that_forward_installs_are_its_own():
    torch.manual_seed(0)
    eager = Collecting()
    model, x = ORTModule(copy.deepcopy(eager)), torch.randn(3, 4)
    for _ in range(3):
        (ours, found), (want, states) = model(x, collect=True), eager(x, collect=True)
        torch.testing.assert_close(ours, want)
        torch.testing.assert_close(found, states)
        assert len(found) == 2
        torch.testing.assert_close(model(x)[0], eager(x)[0])
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == ((6, 0) if RECENT else (5, 1)), counts["reasons"]
    assert len(model.module(x, collect=True)[1]) == 2
    assert [len(layer._forward_hooks) for layer in model.module.layers] == [1, 1]
    again = ORTModule(copy.deepcopy(model.module))  # its hooks are known
    assert len(again(x, collect=True)[1]) == 2 and onnxtrain.stats(again)["engine_steps"] == 1


def test_a_hook_that_names_nothing_but_its_arguments_is_traced():
    def unfrozen(module, args, output):
        output.requires_grad_(True)

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    module[0].register_forward_hook(unfrozen)
    module[1].register_forward_hook(lambda m, args, output: output * 7)
    eager, model, x = copy.deepcopy(module), ORTModule(module), torch.randn(2, 4)
    ours, want = model(x), eager(x)
    torch.testing.assert_close(ours, want)
    ours.sum().backward(), want.sum().backward()
    torch.testing.assert_close(module[1].weight.grad, eager[1].weight.grad)
    assert onnxtrain.stats(model)["engine_steps"] == 1


class Labelled(Base):
    """As transformers finds out what kind of labels it has, at the first call."""

    def forward(self, x):
        if self.config.kind is None:
            self.config.kind = "float" if x.is_floating_point() else "integer"
        return self.fc(x) * (2 if self.config.kind == "float" else 1)


def test_a_plain_value_that_changes_nothing_is_set_for_good():
    model = ORTModule(Labelled(None, config=Box(kind=None)))
    x = torch.randn(2, 4)
    for _ in range(3):
        torch.testing.assert_close(model(x), 2 * model.module.fc(x))
        assert model.config.kind == "float"
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (3, 0), counts["reasons"]
    model.config.kind = "integer"
    torch.testing.assert_close(model(x), model.module.fc(x))


def test_a_configuration_that_refuses_writes():
    model = ORTModule(Base(lambda m, h: h * m.config.scale + m.config["shift"], config=Frozen(scale=2.0, shift=1.0)))
    x = torch.randn(2, 4)
    before = structure(model.module)
    torch.testing.assert_close(model(x), model.module(x))
    assert onnxtrain.stats(model)["engine_steps"] == 1 and structure(model.module) == before


def test_what_is_long_is_put_back_as_well():
    """Beyond the length to which items are looked into, a list is still one."""
    model = ORTModule(Base(lambda m, h: m.rows.append(0) or h + len(m.rows), rows=list(range(10_000))))
    x = torch.randn(2, 4)
    for count in range(3):
        torch.testing.assert_close(model(x), model.module.fc(x) + 10_001 + count)
    assert onnxtrain.stats(model)["engine_steps"] == 3


def test_hooks_of_all_modules():
    seen = []
    model, x = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), torch.randn(2, 4)
    model(x)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, args, output: seen.append(type(m).__name__))
    try:
        model(x), model(x)
    finally:
        handle.remove()
    assert seen.count("Linear") == seen.count("Tanh") == 2
    model(x)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 2 and counts["fallback_steps"] == 2
    assert any("global module hook" in reason for reason in counts["reasons"])


def test_functions_with_a_state_among_arguments_and_results():
    class Calling(Base):
        def forward(self, x, callback=None):
            h = self.fc(x)
            if callback is not None:
                callback(h)
            return h, (lambda t: t * h) if callback is None else torch.relu

    seen = []
    model, x = ORTModule(Calling(None)), torch.randn(2, 4)
    for _ in range(2):
        h, scaled = model(x)
        assert type(scaled(x)) is torch.Tensor
        torch.testing.assert_close(scaled(x), x * h)
        model(x, seen.append)
    assert len(seen) == 2 and type(seen[0]) is torch.Tensor
    assert model(x, len)[1] is torch.relu
    assert onnxtrain.stats(model)["fallback_steps"] == 0


@pytest.mark.parametrize("draw", [
    lambda h: torch.randn(4, generator=torch.Generator().manual_seed(0)),
    lambda h: torch.bernoulli(torch.full((4,), 0.5), generator=torch.Generator().manual_seed(1)),
    lambda h: torch.empty(4).normal_(generator=torch.Generator().manual_seed(2)),
], ids=["randn", "bernoulli", "normal_"])
def test_a_generator_of_torch_made_in_forward(draw):
    model, x = ORTModule(Base(lambda m, h: h + draw(h))), torch.randn(3, 4)
    for _ in range(2):
        torch.testing.assert_close(model(x), model.module(x))
    counts = onnxtrain.stats(model)
    if not RECENT:
        assert counts["fallback_steps"] == 2
    elif counts["graph_breaks"]:  # Python draws, between two graphs
        assert counts["engine_steps"] == 2 and "torch.Generator method" in str(counts["graph_breaks"])
    else:
        assert counts["fallback_steps"] == 2 and "its own torch.Generator" in counts["reasons"][0]


def _forked(h):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.rand_like(h)


def _put_back(h):
    before = torch.get_rng_state()
    drawn = torch.rand_like(h)
    torch.set_rng_state(before)
    return drawn


@pytest.mark.parametrize("draw", [
    lambda h: torch.manual_seed(3) and torch.dropout(h, 0.5, True), _forked, _put_back,
    lambda h: torch.random.default_generator.manual_seed(3) and torch.rand(4),
], ids=["manual_seed", "fork_rng", "set_rng_state", "generator"])
def test_a_seed_in_forward(draw):
    """As Reformer hashes, and LSH attention: the graph would draw from the caller's numbers."""
    model, x = ORTModule(Base(lambda m, h: h + draw(h))), torch.randn(3, 4)
    for seed in range(2):
        torch.manual_seed(seed)
        want, after = model.module(x), torch.rand(1)
        torch.manual_seed(seed)
        torch.testing.assert_close(model(x), want)
        assert torch.equal(torch.rand(1), after)
    counts = onnxtrain.stats(model)
    cuts = [text.partition(", in ")[0] for text in counts["graph_breaks"]]
    if cuts == ["torch.Generator method"] or (  # between two graphs, of which none draws
            draw is _forked and cuts == ["torch.* op returned non-Tensor"] and not counts["reasons"]):
        assert counts["engine_steps"] == 2
    else:
        assert counts["fallback_steps"] == 2 and ("seeds torch's random generator" in counts["reasons"][0]
                                                  or "captured no tensor operations" in counts["reasons"][0])


@pytest.mark.parametrize("name", ["_known_export", "_program", "_first_run"])
def test_no_exception_of_an_export_is_without_a_name(monkeypatch, name):
    def broken(*_args, **_kwargs):
        raise KeyError("obj_module_lifted_custom_0")

    monkeypatch.setattr(GraphRunner, name, broken)
    model, x = ORTModule(nn.Linear(4, 4)), torch.randn(2, 4)
    torch.testing.assert_close(model(x), model.module(x))
    assert "stopped with KeyError: 'obj_module_lifted_custom_0'" in onnxtrain.stats(model)["reasons"][0]
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleTorchModelException, match="stopped with KeyError"):
        ORTModule(nn.Linear(4, 4))(x)
