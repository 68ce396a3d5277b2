"""Code that reads or changes scores which are computed with a loss outside the module, or not at all: its results,
gradients and errors are eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from deferred_models import BATCH, LENGTH, WORDS, batch, joined, masked, pair, same_gradients, settled, step
from torch import nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._deferred import DeferredScores
from onnxtrain.ortmodule._unread import QUIET, READS, STEPS

KNOWN = [lambda s: s.shape, lambda s: s.size(), lambda s: s.size(-1), lambda s: s.dim(), lambda s: s.ndim, len,
         lambda s: s.numel(), lambda s: s.dtype, lambda s: s.device, lambda s: s.requires_grad,
         lambda s: s.view(-1, WORDS).shape, lambda s: s[:, 1:].size(1), lambda s: s.is_floating_point(),
         lambda s: s.contiguous() is s, lambda s: s.float() is s, lambda s: s.to("cpu") is s.cpu() is s]


def test_what_is_known_is_no_reading():
    eager, ours = pair()
    settled(ours)
    for seed in range(2 * READS):
        x, y = batch(seed)
        scores, want = ours(x), eager(x)
        assert type(scores) is DeferredScores and [ask(scores) for ask in KNOWN] == [ask(want) for ask in KNOWN]
        loss = masked(scores, y)
        del scores
        loss.backward()
    assert joined(ours) == 1


READERS = {
    "arithmetic": lambda s: s * 1, "a method": lambda s: s.softmax(-1), "a function": torch.exp,
    "an index": lambda s: s[torch.tensor([1, 0])], "a part of the classes": lambda s: s[..., 3:5],
    "mixed classes": lambda s: s.view(-1, WORDS // 2), "numpy": lambda s: torch.from_numpy(s.detach().numpy()),
    "a view": lambda s: s.view(-1, WORDS) * 2, "a copy": lambda s: s[:, :-1].contiguous().view(-1, WORDS) + 1,
    "other bits": lambda s: s.view(torch.int32).view(torch.float32), "double": lambda s: s.to(torch.float64), "data": lambda s: s.data,
    "a leaf": lambda s: torch.tensor(s.is_leaf),
    "accuracy": lambda s: (s.argmax(-1) == batch(9)[1]).float().mean(), "a list": lambda s: torch.cat([s, s]),
    "no gradient": lambda s: torch.tensor(s.detach().view(-1, WORDS).requires_grad),
    "a weighted loss": lambda s: F.cross_entropy(s.view(-1, WORDS), batch(9)[1].view(-1), weight=torch.ones(WORDS)),
    "a smooth loss": lambda s: F.cross_entropy(s.view(-1, WORDS), batch(9)[1].view(-1), label_smoothing=0.1),
    "probabilities": lambda s: F.cross_entropy(s.view(-1, WORDS), F.one_hot(batch(9)[0].view(-1), WORDS).float()),
    "each loss": lambda s: F.cross_entropy(s.view(-1, WORDS), batch(9)[1].view(-1), reduction="none"),
    "a compiled function": torch.compile(lambda s: s.amax(-1), backend="aot_eager"),
}


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_what_is_read_is_eagers(name, behind):
    """In front of the loss, or behind it."""
    eager, ours = pair()
    settled(ours)
    found = []
    for model in (ours, eager):
        scores = model(batch(9)[0])
        losses = [masked(scores, batch(9)[1])] if behind else []
        read = READERS[name](scores)
        losses += [] if behind else [masked(scores, batch(9)[1])]
        if read.requires_grad:
            losses.append(read.square().mean())
        sum(losses).backward()
        found.append(read.detach())
    assert type(ours(batch(9)[0])) is DeferredScores
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    same_gradients(ours, eager, 1e-4)


def test_changes_in_place_of_scores_that_are_computed_late():
    """A copy that was made before has what they held before, a view what they hold."""
    results = []
    eager, ours = pair()
    settled(ours)
    for model in (ours, eager):
        scores = model(batch(9)[0])
        copied, view, behind = scores[:, 1:].contiguous(), scores.view(-1, WORDS), scores[:, 1:]
        scores.mul_(2)
        results.append((scores, copied * 1, view * 1, behind * 1))
        (masked(scores, batch(9)[1]) + copied.square().mean()).backward()
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    same_gradients(ours, eager, 1e-4)


def test_dropout_of_scores_that_are_read_is_that_of_their_loss():
    _, ours = pair(dropout=0.5)
    settled(ours)
    scores = ours(batch(9)[0])
    torch.manual_seed(1)  # changes nothing: the masks are drawn when the module is called
    loss = masked(scores, batch(9)[1])
    torch.testing.assert_close(masked(scores * 1, batch(9)[1]), loss)


def test_accuracy_behind_the_loss_at_each_step_ends_it():
    eager, ours = pair()
    settled(ours)
    for seed in range(READS + 2):
        x, y = batch(seed)
        ours.zero_grad()
        eager.zero_grad()
        found = []
        for model in (ours, eager):
            scores = model(x)
            loss = F.cross_entropy(scores.view(-1, WORDS), y.view(-1))
            found.append((scores.argmax(-1) == y).sum())
            loss.backward()
        assert torch.equal(*found)
        same_gradients(ours, eager)
        assert joined(ours) == (seed < READS - 1)
    assert type(ours(x)) is torch.Tensor


@pytest.mark.parametrize("held", [False, True])
def test_scores_that_are_read_now_and_then(held):
    """Printed in front of backward, or held until behind the optimizer's step, from the first step on."""
    eager, ours = pair()
    optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in (ours, eager)]
    for seed in range(3 * (QUIET + 2)):
        found = []
        for model, optimizer in zip((ours, eager), optimizers, strict=True):
            optimizer.zero_grad()
            scores = model(batch(seed)[0])
            loss = masked(scores, batch(seed)[1])
            if seed % (QUIET + 2) or not held:
                if seed % (QUIET + 2) == 0:
                    found.append(scores.detach().amax(-1))
                del scores
            loss.backward()
            optimizer.step()
            if seed % (QUIET + 2) == 0 and held:
                found.append(scores.detach().amax(-1))
        same_gradients(ours, eager, 1e-4)
        if found:
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert joined(ours) == 1


def test_the_module_is_set_to_evaluation_before_the_loss():
    eager, ours = pair()
    settled(ours)
    scores = ours(batch(1)[0])
    ours.eval()
    masked(scores, batch(1)[1]).backward()
    step(eager, 1)
    same_gradients(ours, eager)


def test_inference_mode_between_scores_and_loss():
    eager, ours = pair()
    settled(ours)
    scores = ours(batch(1)[0])
    with torch.inference_mode():
        assert scores.argmax(-1).shape == (BATCH, LENGTH)
    masked(scores, batch(1)[1]).backward()
    step(eager, 1)
    same_gradients(ours, eager)


@pytest.mark.parametrize("change", [lambda model, x: next(model.parameters()).zero_(), lambda model, x: x.zero_()],
                         ids=["weights", "arguments"])
@pytest.mark.parametrize("behind", [False, True])
def test_changes_before_the_scores_are_computed(change, behind):
    _, ours = pair()
    settled(ours)
    x, y = batch(1)
    scores = ours(x)
    if behind:
        masked(scores, y)
    with torch.no_grad():
        change(ours, x)
    with pytest.raises(RuntimeError, match="have changed"):
        scores.sum() if behind else masked(scores, y)


def test_weights_that_are_replaced_before_the_loss():
    eager, ours = pair()
    settled(ours)
    for model in (ours, eager):
        scores = model(batch(1)[0])
        old, model.head.weight = model.head.weight, nn.Parameter(torch.zeros(WORDS, 16))
        masked(scores, batch(1)[1]).backward()
        model.head.weight = old
    same_gradients(ours, eager)


WRONG = {
    "a word that there is not": (lambda x, y: (x.clone().fill_(WORDS), y), IndexError),
    "a label that there is not": (lambda x, y: (x, y.clone().fill_(WORDS)), IndexError),
    "fewer labels": (lambda x, y: (x, y[1:]), ValueError),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs(name):
    change, kind = WRONG[name]
    eager, ours = pair(dropout=0.2)
    settled(ours)
    texts = []
    for model in (eager, ours):
        with pytest.raises(kind) as raised:
            step(model, 1, batch=lambda seed: change(*batch(seed)))
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    step(ours, 2)
    assert joined(ours) == 1


def test_views_that_do_not_fit():
    eager, ours = pair()
    settled(ours)
    for view in (lambda s: s.view(7, -1), lambda s: s.transpose(0, 1).view(-1, WORDS), lambda s: s[:, :, :, 0],
                 lambda s: s.unflatten(0, (3, 3))):
        texts = []
        for model in (eager, ours):
            with pytest.raises((RuntimeError, IndexError)) as raised:
                view(model(batch(1)[0]))
            texts.append(str(raised.value))
        assert texts[0] == texts[1]


ASKED = {
    "a hook": lambda scores, loss: scores.register_hook(lambda gradient: None),
    "retain_grad": lambda scores, loss: scores.retain_grad(),
    "grad": lambda scores, loss: torch.autograd.grad(loss, scores),
    "backward": lambda scores, loss: loss.backward(inputs=[scores]),
    "a node": lambda scores, loss: scores.grad_fn,
    "an edge": lambda scores, loss: torch.autograd.graph.get_gradient_edge(scores),
    "the gradient": lambda scores, loss: scores.grad,
}


@pytest.mark.parametrize("name", ASKED)
def test_the_gradient_of_scores_behind_their_loss(name):
    _, ours = pair()
    settled(ours)
    scores = ours(batch(1)[0])
    loss = masked(scores, batch(1)[1])
    with pytest.raises(RuntimeError, match="computed the loss without storing them"):
        ASKED[name](scores, loss)


def test_the_gradient_of_scores_that_is_asked_for_before():
    eager, ours = pair()
    settled(ours)
    found = []
    for model in (ours, eager):
        scores = model(batch(1)[0])
        scores.retain_grad()
        scores.register_hook(lambda gradient: gradient * 2)
        assert scores.grad_fn is not None and not scores.is_leaf
        loss = masked(scores, batch(1)[1])
        loss.backward()
        found.append(scores.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)
    same_gradients(ours, eager)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Rows(nn.Module):
    def forward(self, scores):
        return scores.square().mean()


@pytest.mark.parametrize("made", [
    lambda s: Double.apply(s).sum(), lambda s: ORTModule(Rows())(s), lambda s: torch.autograd.backward([s], [torch.ones(s.shape)]),
    lambda s: torch.utils.checkpoint.checkpoint(lambda t: Double.apply(t).sum(), s, use_reentrant=False),
    lambda s: torch.utils.checkpoint.checkpoint(lambda t: t.square().sum(), s, use_reentrant=True),
], ids=["a function", "an ORTModule", "backward", "a checkpoint", "a reentrant checkpoint"])
def test_functions_that_do_not_see_pythons_tensors(made):
    """Their gradients are right, or an error says that they are not."""
    eager, ours = pair()
    settled(ours)
    try:
        for model in (ours, eager):
            if (loss := made(model(batch(1)[0]))) is not None:
                loss.backward()
    except RuntimeError as error:
        assert "was not computed yet" in str(error)
    else:
        same_gradients(ours, eager)


HELD = {
    "held": lambda model, x, y, kept: kept.append(model(x)) or masked(kept[-1], y),
    "detached": lambda model, x, y, kept: (scores := model(x), kept.append(scores.detach())) and masked(scores, y),
    "read as well": lambda model, x, y, kept: (scores := model(x)).square().mean() + masked(scores, y),
    "two losses": lambda model, x, y, kept: masked(scores := model(x), y) + masked(scores, y),
    "computed further": lambda model, x, y, kept: masked(model(x).relu(), y),
    "smooth": lambda model, x, y, kept: F.cross_entropy(model(x).view(-1, WORDS), y.view(-1), label_smoothing=0.1),
    "another loss": lambda model, x, y, kept: F.nll_loss(model(x).view(-1, WORDS).log_softmax(-1), y.view(-1)),
}


@pytest.mark.parametrize("name", HELD)
def test_where_scores_are_read_from_the_first(name):
    eager, ours = pair()
    for seed in range(2 * STEPS):
        ours.zero_grad()
        eager.zero_grad()
        for model in (ours, eager):
            kept = []
            HELD[name](model, *batch(seed), kept).backward()
        same_gradients(ours, eager)
    assert joined(ours) == 0 and type(ours(batch(1)[0])) is torch.Tensor and onnxtrain.stats(ours)["exports"] == 1


def test_no_name_is_one_of_tensors():
    own = {*vars(DeferredScores), *DeferredScores.__annotations__}
    assert {name for name in own & {*dir(torch.Tensor)} if not name.startswith("__")} == set()
