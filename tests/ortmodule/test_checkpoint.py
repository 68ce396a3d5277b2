"""torch.utils.checkpoint inside a module: what it is around is a recompute region of the engine's."""

import copy
import logging

import pytest
import torch
import torch.nn as nn
from torch.utils import checkpoint

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

BLOCKS, ROWS, WIDTH = 8, 512, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """kind: how its blocks are called; "": without a checkpoint."""

    def __init__(self, kind, layer=Block, blocks=BLOCKS):
        super().__init__()
        self.blocks, self.kind = nn.ModuleList(layer() for _ in range(blocks)), kind

    def forward(self, x):
        if self.kind == "nested":
            half = len(self.blocks) // 2
            for part in (self.blocks[:half], self.blocks[half:]):
                x = checkpoint.checkpoint(self.several, part, x, use_reentrant=False)
            return x
        return self.several(self.blocks, x)

    def several(self, blocks, x):
        for block in blocks:
            if self.kind:
                x = checkpoint.checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            else:
                x = block(x)
        return x


@pytest.fixture(autouse=True)
def passes_as_they_were():
    yield
    _C.disable_passes([])


def program_of(model):
    [(_, [program])] = model._all_programs()
    return program


def totals(model):
    return program_of(model).totals()


def step(model, x):
    """Output and gradients of one step, with the same random numbers at each call."""
    wanted = [x, *model.parameters()]
    for tensor in wanted:
        tensor.grad = None
    torch.manual_seed(3)
    y = model(x)
    y.square().mean().backward()  # torch's own checkpoint refuses autograd.grad() where it is reentrant
    return [y.detach(), *(tensor.grad for tensor in wanted)]


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "torch.utils.checkpoint" in r.getMessage()]


class Asked(nn.Module):
    """A parameter is among the inputs of the second checkpoint."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        h = checkpoint.checkpoint(self.first, x, use_reentrant=True)
        return self.out(checkpoint.checkpoint(lambda h, query: self.second(h * query), h, self.query, use_reentrant=True))


def test_a_reentrant_one_whose_input_wants_no_gradient_is_pytorchs():
    torch.manual_seed(0)
    eager = Asked()
    model = ORTModule(copy.deepcopy(eager))
    for asks in (False, True, False):
        x = torch.randn(ROWS, WIDTH)
        for module in (eager, model):
            module.zero_grad()
            module(x.clone().requires_grad_(asks)).sum().backward()
        for got, want in zip(model.parameters(), eager.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None)
            assert want.grad is None or torch.allclose(got.grad, want.grad, rtol=1e-4, atol=1e-4)
        assert asks or eager.first.weight.grad is None and eager.second.weight.grad is not None
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] >= 1 and "use_reentrant=True" in counts["reasons"][0]


@pytest.mark.parametrize("kind", ["plain", "reentrant", "nested"])
def test_backward_keeps_what_enters_the_blocks(kind, caplog):
    torch.manual_seed(0)
    eager = Net(kind)
    model, x = ORTModule(copy.deepcopy(eager)), torch.randn(ROWS, WIDTH, requires_grad=True)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        got = step(model, x)
    assert onnxtrain.stats(model)["engine_steps"] == 1
    assert not warnings_of(caplog)
    assert any("around blocks.0 is a recompute region" in note for note in program_of(model).exported.notes)
    on = totals(model)
    unit = ROWS * WIDTH * 4  # bytes of what enters a block; its interior has five of these, which need a gradient too
    between = {"nested": 1}.get(kind, BLOCKS - 1)
    assert on["kept_bytes"] <= between * unit + 4096 * BLOCKS
    assert on["slab_bytes"] <= ((BLOCKS // 2 if kind == "nested" else between) + 14) * unit
    report = onnxtrain.memory_report(model, (ROWS, WIDTH))
    assert report.slab_bytes == on["slab_bytes"] and report.phases["kept"] == on["kept_bytes"]

    _C.disable_passes(["recompute_regions"])
    unmarked = ORTModule(copy.deepcopy(eager))
    expected = step(unmarked, x)
    assert totals(unmarked)["kept_bytes"] > 5 * BLOCKS * unit
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    eager.eval(), model.eval()  # without dropout, whose numbers are the engine's own
    for a, b in zip(step(model, x), step(eager, x), strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_the_memory_of_transformers_checkpoints():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=100, n_positions=64)
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config).train()
    tokens, got = torch.randint(100, (4, 64)), {}
    for name in ("plain", "marked"):
        module = copy.deepcopy(plain)
        if name == "marked":
            module.gradient_checkpointing_enable()
        model = ORTModule(module)
        torch.manual_seed(3)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        assert onnxtrain.stats(model)["fallback_steps"] == 0
        got[name] = totals(model), [p.grad for p in module.parameters()]
    for a, b in zip(got["plain"][1], got["marked"][1], strict=True):
        assert torch.equal(a, b)
    unit = 4 * 64 * 128 * 4
    assert got["plain"][0]["kept_bytes"] > 6 * 8 * unit
    assert got["marked"][0]["kept_bytes"] < 0.4 * got["plain"][0]["kept_bytes"]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class Cubed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(torch.tanh(self.up(Cube.apply(torch.tanh(x))))))


def test_a_function_of_torch_inside_is_named(caplog):
    torch.manual_seed(0)
    eager = Net("plain", Cubed, 2)
    model, x = ORTModule(copy.deepcopy(eager)), torch.randn(ROWS, WIDTH, requires_grad=True)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        got = step(model, x)
    assert [f"around blocks.{i} is a recompute region in parts" in text
            for i, text in enumerate(warnings_of(caplog))] == [True, True]
    assert totals(model)["recomputed_nodes"] > 0
    for a, b in zip(got, step(eager, x), strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
