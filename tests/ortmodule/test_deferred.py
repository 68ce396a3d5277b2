"""A loss outside the module that is computed with it: loss, gradients and random numbers are those of the two one after
the other. What other code does with the scores is in test_deferred_reads.py."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from deferred_models import (
    BATCH,
    LENGTH,
    WORDS,
    Model,
    Padded,
    batch,
    gradients,
    joined,
    masked,
    padded_batch,
    pair,
    same_gradients,
    settled,
    step,
)
from torch import nn

import onnxtrain
from onnxtrain import dynamo
from onnxtrain.ortmodule import ORTModule, _deferred
from onnxtrain.ortmodule._unread import STEPS

LOSSES = {
    "masked words": masked,
    "shifted": lambda s, y: F.cross_entropy(s[..., :-1, :].contiguous().view(-1, s.size(-1)),
                                            y[..., 1:].contiguous().view(-1)),
    "shifted, reshape": lambda s, y: F.cross_entropy(s[:, :-1].reshape(-1, s.shape[-1]), y[:, 1:].reshape(-1)),
    "shifted, transposed": lambda s, y: F.cross_entropy(s[:, :-1, :].transpose(1, 2), y[:, 1:]),
    "classes first": lambda s, y: nn.CrossEntropyLoss()(s.transpose(1, 2), y),
    "permuted": lambda s, y: nn.CrossEntropyLoss(reduction="sum")(s.permute(1, 2, 0), y.T),
    "flatten": lambda s, y: nn.CrossEntropyLoss()(s.flatten(0, 1), y.flatten()),
    "float": lambda s, y: F.cross_entropy(s.float().view(-1, WORDS), y.view(-1)),
    "sizes": lambda s, y: F.cross_entropy(s.view(s.size(0) * s.shape[1], s.shape[-1]), y.view(s.dim() * 0 - 1)),
    "a column more": lambda s, y: F.cross_entropy(s.unsqueeze(2).squeeze(2).unflatten(0, (2, -1)).flatten(0, 2),
                                                  y.view(-1)),
    "sum, scaled": lambda s, y: F.cross_entropy(s.view(-1, WORDS), y.view(-1), reduction="sum") / 128,
    "another index": lambda s, y: F.cross_entropy(s.view(-1, WORDS), y.where(y != -100, 7).view(-1), ignore_index=7),
    "all labels": lambda s, y: F.cross_entropy(s.view(-1, WORDS), y.abs().view(-1)),
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", LOSSES)
def test_training(name, dropout, monkeypatch):
    """Against a model that is not watched, with the same masks, of batches of any size."""
    loss = LOSSES[name]
    dtype = torch.float32 if name == "float" else torch.float64
    eager, ours = pair(dropout=dropout, dtype=dtype)
    monkeypatch.setenv("ONNXTRAIN_DISABLE", "outside_loss")
    plain = ORTModule(copy.deepcopy(eager))
    step(plain, 0)
    plain.zero_grad()
    monkeypatch.delenv("ONNXTRAIN_DISABLE")
    models = [ours, plain] if dropout else [ours, plain, eager]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    for seed in range(2 * STEPS + 2):
        losses, drawn = [], []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            losses.append(step(model, seed, loss, lambda seed: batch(seed, BATCH + 2 * (seed % 2), LENGTH - seed % 3)))
            drawn.append(torch.rand(3))
        for other, value in zip(models[1:], losses[1:], strict=True):
            torch.testing.assert_close(losses[0], value, rtol=tolerance, atol=tolerance)
            same_gradients(ours, other, tolerance)
        assert torch.equal(drawn[0], drawn[1])
        for optimizer in optimizers:
            optimizer.step()
        assert joined(ours) == (seed >= STEPS) and joined(plain) == 0
    stats = onnxtrain.stats(ours)
    assert stats["engine_steps"] == 2 * STEPS + 2 and stats["fallback_steps"] == 0 and stats["exports"] == 2
    assert "that the engine computes together with it: 1" in onnxtrain.explain(ours)
    full, short = [program for _, programs in ours._all_programs() for program in programs]
    assert full.steps == STEPS + 1 and short.steps == STEPS + 2


class Flat(Model):
    """Scores of all positions of a batch in one column."""

    def forward(self, x):
        return super().forward(x).view(-1, WORDS)


def test_scores_that_forward_flattens():
    eager, ours = pair(Flat, torch.float64)
    for seed in range(2 * STEPS):
        for model in (ours, eager):
            model.zero_grad()
            step(model, seed, masked, lambda seed: batch(seed, BATCH + seed % 2, LENGTH - seed % 3))
        same_gradients(ours, eager, 1e-10)
    assert joined(ours) == 1


def test_rows_without_labels_and_padding_are_left_out():
    """As much as with the loss inside."""
    class Inside(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x, y):
            return masked(self.module(x), y)

    eager, ours = pair(Padded)
    settled(ours, batch=padded_batch)
    inside = ORTModule(Inside(copy.deepcopy(eager)))
    for seed in range(2):
        values = []
        for model, run in ((ours, lambda m, x, y: masked(m(x), y)), (inside, lambda m, x, y: m(x, y))):
            torch.manual_seed(seed)
            model.zero_grad()
            values.append(run(model, *padded_batch(seed)))
            values[-1].backward()
        torch.testing.assert_close(*values)
        same_gradients(ours, inside)
    slabs = [max(program.totals()["slab_bytes"] for _, known in model._all_programs() for program in known)
             for model in (ours, inside)]
    assert slabs[0] == slabs[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("widened", [False, True])
def test_autocast(dtype, widened):
    def once(model, seed):
        with torch.autocast("cpu", dtype):
            value = masked(model(batch(seed)[0]).float() if widened else model(batch(seed)[0]), batch(seed)[1])
        value.backward()
        return value.detach()

    eager, ours = pair()
    for seed in range(STEPS + 3):
        ours.zero_grad()
        eager.zero_grad()
        got, want = once(ours, seed), once(eager, seed)
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        same_gradients(ours, eager, 5e-2)
    assert joined(ours) == 1


def test_a_loss_in_another_mode_than_the_scores():
    eager, ours = pair()
    settled(ours)
    with torch.autocast("cpu", torch.bfloat16):
        scores = ours(batch(1)[0])
    value = F.cross_entropy(scores.float().view(-1, WORDS), batch(1)[1].view(-1))
    with torch.autocast("cpu", torch.bfloat16):
        want = eager(batch(1)[0])
    torch.testing.assert_close(value, masked(want.float(), batch(1)[1]), rtol=1e-2, atol=1e-2)
    value.backward()


def test_evaluation_between_steps():
    eager, ours = pair(dropout=0.3)
    settled(ours)
    ours.eval()
    eager.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(batch(1)[0]), eager(batch(1)[0]), rtol=1e-4, atol=1e-5)
    step(ours, 1)
    step(eager, 1)
    same_gradients(ours, eager)
    ours.train()
    step(ours, 2)
    assert joined(ours) == 1


def test_accumulated_retained_and_interleaved_gradients():
    eager, ours = pair()
    settled(ours)
    for model in (ours, eager):
        for seed in range(2):
            step(model, seed)
        first, second = (masked(model(batch(seed)[0]), batch(seed)[1]) for seed in (3, 4))
        first.backward(retain_graph=True)
        (first * 2 + second).backward()
    same_gradients(ours, eager)
    assert joined(ours) == 1


def test_gradients_that_are_differentiated():
    eager, ours = pair(dtype=torch.float64)
    settled(ours)
    found = []
    for model in (ours, eager):
        loss = masked(model(batch(1)[0]), batch(1)[1])
        weights = list(model.parameters())
        first = torch.autograd.grad(loss, weights, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), weights))
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() <= 1e-10 * want.abs().max()


def test_scores_of_two_losses():
    eager, ours = pair()
    settled(ours)
    for model in (ours, eager):
        scores = model(batch(1)[0])
        (masked(scores, batch(1)[1]) + masked(scores, batch(2)[1])).backward()
    same_gradients(ours, eager)


def test_two_models():
    """The second's loss reads the first's scores as well."""
    eager, ours = zip(*(pair(dropout=0.0) for _ in range(2)), strict=True)
    for model in ours:
        settled(model)
    for one, other in (ours, eager):
        x, y = batch(1)
        first, second = one(x), other(x)
        loss = masked(second, y) + masked(first, y)
        loss = loss + (first - second).square().mean()
        loss.backward()
    for one, other in zip(ours, eager, strict=True):
        same_gradients(one, other, 1e-4)


def test_threads():
    """Each with a model of its own; masks are those of the seeds that the calls drew."""
    models = [settled(pair(dropout=0.2)[1]) for _ in range(2)]
    failures = []

    def train(model):
        try:
            for seed in range(10):
                scores = model(batch(seed)[0])
                loss = masked(scores, batch(seed)[1])
                torch.testing.assert_close(masked(scores * 1, batch(seed)[1]), loss) if seed == 9 else None
                del scores
                loss.backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and [joined(model) for model in models] == [1, 1]


def test_scores_that_another_thread_makes_a_loss_of():
    eager, ours = pair()
    settled(ours)
    scores = ours(batch(1)[0])
    thread = threading.Thread(target=lambda: masked(scores, batch(1)[1]).backward())
    thread.start()
    thread.join()
    step(eager, 1)
    same_gradients(ours, eager)


def test_a_module_in_a_checkpoint():
    eager, ours = pair()
    settled(ours)
    for reentrant in (False, True):
        for model in (ours, eager):
            model.zero_grad()
            x = batch(1)[0]
            free = torch.zeros((), requires_grad=True)
            run = lambda free, x: model(x) + 0 * free if reentrant else model(x)  # noqa: B023, E731
            masked(torch.utils.checkpoint.checkpoint(run, free, x, use_reentrant=reentrant), batch(1)[1]).backward()
        same_gradients(ours, eager)


def test_hooks_that_pack_what_autograd_saves():
    eager, ours = pair()
    settled(ours)
    for model in (ours, eager):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            scores = model(batch(1)[0])
            assert type(scores) is torch.Tensor
            masked(scores, batch(1)[1]).backward()
    same_gradients(ours, eager)


def test_hooks_of_the_module():
    eager, ours = pair()
    settled(ours)
    seen = []
    for model in (ours, eager):
        model.register_full_backward_hook(lambda module, given, got: seen.append(got[0].shape))
        step(model, 1)
    same_gradients(ours, eager)
    assert seen == 2 * [(BATCH, LENGTH, WORDS)]


def test_a_cross_entropy_in_the_place_of_torchs(monkeypatch):
    """It calls torch's, which hands a subclass of Tensor to the function that stands there."""
    plain = F.cross_entropy
    eager, ours = pair()
    settled(ours)
    monkeypatch.setattr(F, "cross_entropy", lambda *args, **kwargs: 2 * plain(*args, **kwargs))
    for model in (ours, eager):
        step(model, 1)
    same_gradients(ours, eager)


def test_memory_report_is_of_the_modules_own_graph():
    _, ours = pair()
    settled(ours)
    assert onnxtrain.memory_report(ours, (8, LENGTH)).phases["outputs"] == 8 * LENGTH * WORDS * 4


def test_a_small_loss_of_large_scores():
    """Where the steps that were watched had a large one."""
    eager, ours = pair()
    settled(ours)
    for model in (ours, eager):
        scores = model(batch(1)[0])
        F.cross_entropy(scores[:, -1], batch(1)[0][:, -1]).backward()
    same_gradients(ours, eager)
    assert type(scores) is torch.Tensor and joined(ours) == 1


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_models_of_transformers(kind):
    """Their outputs, with a cache beside the scores, and a mask."""
    transformers = pytest.importorskip("transformers")
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2} if kind[0] == "G" else {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.AutoConfig.for_model({"G": "gpt2", "B": "bert"}[kind[0]], vocab_size=WORDS, **shape)
    torch.manual_seed(0)
    eager = getattr(transformers, kind)(config).train()
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    for module in eager.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ours = ORTModule(copy.deepcopy(eager))

    def once(model, seed):
        x, y = padded_batch(seed)
        outputs = model(input_ids=x, attention_mask=(x != 0).long())
        return F.cross_entropy(outputs.logits[..., :-1, :].contiguous().view(-1, WORDS), y[..., 1:].reshape(-1))

    for seed in range(STEPS + 2):
        for model in (ours, eager):
            model.zero_grad()
            once(model, seed).backward()
        same_gradients(ours, eager, 1e-4)
    assert joined(ours) == 1


def test_results_beside_the_scores():
    def loss(results, y):
        return masked(results[0], y)

    eager, ours = pair(more=True)
    settled(ours, loss)
    found = []
    for model in (ours, eager):
        scores, hidden = model(batch(1)[0])
        value = masked(scores, batch(1)[1])
        del scores
        (value + hidden.square().mean()).backward()
        found.append(hidden.detach())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    same_gradients(ours, eager)


@pytest.mark.parametrize("name", ["changed buffers", "outside_loss", "unread", "cut", "small scores", "evaluation",
                                  "in PyTorch"])
def test_where_it_is_not_used(name, monkeypatch):
    if name in ("outside_loss", "unread"):
        monkeypatch.setenv("ONNXTRAIN_DISABLE", name)
    if name == "small scores":
        monkeypatch.setattr(_deferred, "LEAST_ELEMENTS", BATCH * LENGTH * WORDS + 1)
    eager, _ = pair(norm=name == "changed buffers")
    if name in ("cut", "in PyTorch"):
        forward = eager.forward

        def changed(x):
            torch._dynamo.graph_break() if name == "cut" else torch.manual_seed(3)
            return forward(x)

        eager.forward = changed
    if name == "evaluation":
        eager.eval()
    ours = ORTModule(eager)
    for seed in range(2 * STEPS):
        step(ours, seed)
    assert joined(ours) == 0 and type(ours(batch(1)[0])) is torch.Tensor


@pytest.mark.parametrize("name", ["raises", "another loss", "in PyTorch"])
def test_a_graph_that_does_not_run_with_the_loss(name, monkeypatch):
    plain = dynamo._compiled_with_loss

    def changed(graph, examples, parts, place, reduction, ignore_index, widened):
        if name == "raises":
            raise ValueError("none")
        if name == "in PyTorch":
            return parts().by_torch(plain(graph, examples, parts, place, reduction, ignore_index, widened), "a test")
        return plain(graph, examples, parts, place, "sum", ignore_index, widened)

    monkeypatch.setattr(dynamo, "_compiled_with_loss", changed)
    eager, ours = pair()
    for seed in range(STEPS + 3):
        ours.zero_grad()
        eager.zero_grad()
        torch.testing.assert_close(step(ours, seed), step(eager, seed))
        same_gradients(ours, eager)
    assert joined(ours) == 0 and type(ours(batch(1)[0])) is torch.Tensor


def test_memory_is_freed():
    _, ours = pair()
    settled(ours)
    blocks = []
    for seed in range(4):
        step(ours, seed)
        masked(ours(batch(seed)[0]), batch(seed)[1])  # never differentiated
        ours(batch(seed)[0])  # never computed
        ours.zero_grad()
        blocks.append(onnxtrain._C.live_blocks())
    assert blocks[1] >= blocks[2] >= blocks[3]


def test_frozen_weights():
    """Arguments that had a gradient, and have none now."""
    eager, ours = pair()
    settled(ours)
    for model in (ours, eager):
        model.words.requires_grad_(False)
    step(ours, 1)
    step(eager, 1)
    assert ours.words.weight.grad is None
    for got, want in zip(gradients(ours)[1:], gradients(eager)[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
    for parameter in ours.parameters():
        parameter.requires_grad_(False)
    assert not ours(batch(1)[0]).requires_grad
