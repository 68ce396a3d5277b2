"""Backward computes again what a level or a budget of memory asks for, within the budget and with the same bits."""

import logging
import random
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from memory import GPT2
from seeds import drawn_seed
from test_fuse_elementwise import random_model
from test_recompute import bits, network
from torch import nn

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("kernels_by_rule")
SEED = drawn_seed()


def run(model, tensors, seed=7, **kwargs):
    """(session, outputs and gradients as bytes) of one step."""
    session = _C.Session(model, **kwargs)
    outputs, run = session.forward(tensors, b"\1" * len(tensors), seed)
    if run is None:
        return session, [bits(y) for y in outputs]
    torch.manual_seed(3)
    grads = [torch.randn(y.shape).to(y.dtype) if y.is_floating_point() else None for y in outputs]
    found = run.backward([tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs], grads)
    return session, [bits(y) for y in outputs] + [None if g is None else bits(g) for g in found]


def test_levels_differ_and_give_the_same_bits():
    model, tensors = network(256, 1024, layers=6)
    slabs, shares, results = [], [], []
    for level in (0, 1, 2):
        session, got = run(model, tensors, recompute=level)
        stats = session.stats()
        slabs.append(stats["slab_bytes"])
        shares.append(stats["recomputed_share"])
        results.append(got)
    assert results[0] == results[1] == results[2]
    assert slabs[0] > slabs[1] >= slabs[2]
    assert shares[0] <= 0.02 < shares[1] <= 0.2 and shares[1] <= shares[2] <= 0.45


def test_neither_the_last_layer_nor_the_second_product_runs_again():
    """What costs least a byte goes first, and of that what is read last: the first products of the first layers."""
    model, tensors = network(256, 1024, layers=6)
    for kwargs in ({"recompute": 1}, {"budget": 0.6}):
        session, _ = run(model, tensors, **kwargs)
        backward = session.text("program").split("# backward")[1]
        again = re.findall(r" MatMul \(%?\w+, (up|down)(\d)\)", backward)
        assert {which for which, _ in again} == {"up"}
        assert {int(layer) for _, layer in again} == set(range(len({layer for _, layer in again})))
        assert "5" not in {layer for _, layer in again}


def test_copies_are_shared():
    """A product that runs again runs once, for its activation's gradient and for the activation."""
    model, tensors = network(256, 1024, layers=6)
    session, _ = run(model, tensors, budget=0.6)
    names = [name for name, _, backward in session.kernels() if backward and re.fullmatch(r"MatMul_\d+_recompute", name)]
    assert len(names) >= 3 and len(names) == len(set(names))


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_a_budget_is_kept(ratio):
    model, tensors = network(256, 512, layers=8, ratio=ratio)
    session, expected = run(model, tensors)
    whole = session.stats()["slab_bytes"]
    before, share = whole, 0.0
    for percent in range(100, 10, -5):
        session, got = run(model, tensors, budget=percent / 100)
        stats = session.stats()
        assert got == expected, percent
        assert stats["budget_bytes"] == int(percent / 100 * whole)
        assert stats["slab_bytes"] <= before, percent
        assert stats["slab_bytes"] <= stats["budget_bytes"] or percent < 40, percent
        before, share = stats["slab_bytes"], stats["recomputed_share"]
    assert share > 0.1 and before < 0.35 * whole


def test_bytes_are_a_budget_too():
    model, tensors = network(256, 512, layers=8)
    session, expected = run(model, tensors, budget=14 << 20)
    assert session.stats()["slab_bytes"] <= session.stats()["budget_bytes"] == 14 << 20
    assert run(model, tensors)[1] == expected


def test_another_program_of_the_session_is_built_meanwhile():
    """The log may run Python, or another thread, between two builds of a search."""
    model, tensors = network(64, 128, layers=6)
    shapes, mask, other = [list(t.shape) for t in tensors], b"\1" * len(tensors), b"\1" + b"\0" * (len(tensors) - 1)
    found = {}

    class Nested(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("built a program") and not self.within:
                self.within, self.seen = True, self.seen + 1
                if self.seen == 2:  # the first one with a limit
                    found["other"] = session.plan(shapes, other)
                self.within = False

    handler, logger = Nested(), logging.getLogger("onnxtrain")
    handler.within, handler.seen = False, 0
    level = logger.level
    session, alone = (_C.Session(model, budget=0.5) for _ in range(2))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _C.set_log_level(logging.INFO)
    try:
        found["this"] = session.plan(shapes, mask)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        _C.set_log_level(logging.WARNING)
    want = {"this": alone.plan(shapes, mask), "other": alone.plan(shapes, other)}
    assert found == want and 0 < want["other"]["budget_bytes"] < want["this"]["budget_bytes"]


def test_what_cannot_be_held_is_said(caplog):
    model, tensors = network(256, 512, layers=4)
    _, expected = run(model, tensors)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        session, got = run(model, tensors, budget=1000)
    least = session.stats()["slab_bytes"]
    assert got == expected
    message = (f"a step of these sizes needs at least {least / 2**20:.1f} MiB of activations, more than the budget of 0.0 "
               "MiB: raise ORTMODULE_MEMORY_OPT_BUDGET, or make the batch smaller")
    assert [r.message for r in caplog.records] == [message]
    caplog.clear()
    session, got = run(model, tensors, budget=least)
    assert session.stats()["slab_bytes"] <= least and not caplog.records
    with pytest.raises(ValueError, match="budget is negative"):
        _C.Session(model, budget=-1)


@pytest.mark.parametrize("index", range(8))
def test_random_graphs(index):
    model, names = random_model(random.Random(SEED + index))
    generator = torch.Generator().manual_seed(SEED + index)
    tensors = [torch.randn(shape, generator=generator) * (0.1 if name == "w" else 1) for name, shape in names]
    session, expected = run(model, tensors)
    whole = before = session.stats()["slab_bytes"]
    for budget in (0.8, 0.6, 0.4, 0.2):
        session, got = run(model, tensors, budget=budget)
        assert got == expected, budget
        assert session.stats()["slab_bytes"] <= before <= whole, budget
        before = session.stats()["slab_bytes"]


class Adapted(nn.Module):
    """A frozen product of bfloat16 with a trained one of low rank beside it, as LoRA has."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x.float())).to(x.dtype)


class AdaptedBlock(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.up, self.down = Adapted(width, inner), Adapted(width, inner), Adapted(inner, width)

    def forward(self, x):
        h = x.float()
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def test_frozen_blocks_are_not_computed_again_all_at_once():
    """Their residuals are small: evicted, each would ask for all layers below it, which then wait for their turn."""
    torch.manual_seed(0)
    module, x = nn.Sequential(Adapted(64, 64), *[AdaptedBlock(64, 256) for _ in range(8)]), torch.randn(1024, 64)
    results, slabs = [], []
    for level in (0, 1, 2):
        model = ORTModule(module)
        model._runtime.memory_optimization_level = level
        module.zero_grad()
        model(x.bfloat16()).float().square().mean().backward()
        results.append([bits(p.grad) for p in module.parameters() if p.requires_grad])
        slabs.append(onnxtrain.stats(model)["slab_bytes"])
    assert results[0] == results[1] == results[2]
    assert slabs[1] < 0.7 * slabs[0] and slabs[2] <= slabs[1]


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_a_transformer_with_dropout(double, monkeypatch):
    """Attention, its noise and the loss run again: the same loss and gradients, to the bit, however little is kept."""
    monkeypatch.setattr(sys.modules["memory"], "WORDS", 3000)
    torch.manual_seed(0)
    module = GPT2(layers=3, width=64, heads=4).train()
    module = module.double() if double else module
    tokens, targets = torch.randint(0, 3000, (2, 4, 128))
    results, slabs = [], []
    for level, budget in ((0, None), (0, 0.7), (0, 1000.0)):
        model = ORTModule(module)
        model._runtime.memory_optimization_level, model._runtime.memory_budget = level, budget
        module.zero_grad()
        torch.manual_seed(1)
        loss = model(tokens, targets)
        loss.backward()
        results.append([bits(loss), *[bits(p.grad) for p in module.parameters()]])
        slabs.append(onnxtrain.stats(model)["slab_bytes"])
    assert results[0] == results[1] == results[2]
    assert slabs[0] > slabs[1] >= slabs[2] and slabs[1] <= 0.7 * slabs[0]
