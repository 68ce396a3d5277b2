"""Results that no code reads are not computed, and are eager's where code reads them after all."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onnxtrain
from onnxtrain import dynamo
from onnxtrain.ortmodule import ORTModule, _unread
from onnxtrain.ortmodule._unread import READS, STEPS, UnreadResult

WORDS, ROWS = 4096, 64


class Head(nn.Module):
    """A loss with the scores beside it, as transformers' models return them."""

    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.scores = nn.Linear(16, WORDS)

    def forward(self, x, labels):
        scores = self.scores(self.norm(self.dropout(torch.tanh(self.words(x)))))
        return {"loss": F.cross_entropy(scores, labels), "scores": scores}


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randint(0, WORDS, (2, ROWS), generator=generator)
    labels[generator.initial_seed() % 3::3] = -100
    return x, labels


def pair(**kwargs):
    """A module and, wrapped, its copy."""
    torch.manual_seed(5)
    module = Head(**kwargs)
    return module, ORTModule(copy.deepcopy(module))


def loss_alone(model, seed):
    loss = model(*batch(seed))["loss"]
    loss.backward()
    return loss.detach()


def settled(model):
    """The model after the steps that tell what no code reads, and one more."""
    for seed in range(STEPS + 1):
        loss_alone(model, seed)
    model.zero_grad()
    return model


def unread(model):
    return onnxtrain.stats(model)["unread_results"]


def same_gradients(ours, eager):
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


def test_a_training_that_reads_the_loss_alone():
    eager, model = pair()
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (eager, model)]
    for seed in range(3 * STEPS):
        losses = [loss_alone(m, seed) for m in (eager, model)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        same_gradients(model, eager)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert unread(model) == (seed >= STEPS)
    assert onnxtrain.stats(model)["engine_steps"] == 3 * STEPS and onnxtrain.stats(model)["exports"] == 2
    full, short = [program for _, programs in model._all_programs() for program in programs]
    assert full.totals()["slab_bytes"] == 0 < short.totals()["slab_bytes"]
    assert "computed only when code reads them: 1" in onnxtrain.explain(model)


READERS = {
    "arithmetic": lambda scores: scores * 1, "a method": lambda scores: scores.softmax(-1), "a function": torch.exp,
    "the shape": lambda scores: scores.new_tensor(scores.shape), "an index": lambda scores: scores[3:5],
    "numpy": lambda scores: torch.from_numpy(scores.detach().numpy()), "a list": lambda s: torch.tensor(s.tolist()),
    "iteration": lambda scores: torch.stack(list(scores)), "in place": lambda scores: scores.detach().add_(1),
    "a copy": lambda scores: copy.deepcopy(scores.detach()), "out": lambda scores: torch.neg(scores.detach(), out=torch.empty(0)),
    "a pickle": lambda scores: pickle.loads(pickle.dumps(scores.detach())), "data": lambda scores: scores.data,
    "a list of tensors": lambda scores: torch.cat([scores, scores]), "its text": lambda scores: torch.tensor(repr(scores).startswith("tensor([[")),
    "DLPack": lambda scores: torch.from_dlpack(scores.detach()),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_is_read_is_eagers(read):
    eager, model = pair()
    settled(model)
    result = model(*batch(9))["scores"]
    assert type(result) is UnreadResult and isinstance(result, torch.Tensor)
    torch.testing.assert_close(read(result), read(eager(*batch(9))["scores"]), rtol=1e-4, atol=1e-5)


def test_gradients_of_what_is_read():
    eager, model = pair()
    settled(model)
    for m in (eager, model):
        result = m(*batch(9))
        (result["loss"] + result["scores"].square().mean()).backward()
    same_gradients(model, eager)
    assert unread(model) == 1


def test_counts_of_two_graphs_and_of_the_process():
    """Another kind of argument makes a graph of its own."""
    _, model = pair()
    before = onnxtrain.stats()["unread_results"]
    for arguments in (lambda seed: batch(seed), lambda seed: (batch(seed)[0].int(), batch(seed)[1])):
        for seed in range(STEPS + 1):
            model(*arguments(seed))["loss"].backward()
    assert unread(model) == onnxtrain.stats()["unread_results"] - before == 2
    for seed in range(READS):
        model(*batch(seed))["scores"].sum()
    assert unread(model) == onnxtrain.stats()["unread_results"] - before == 1


def test_what_is_known_is_no_reading():
    _, model = pair()
    settled(model)
    for seed in range(2 * READS):
        result = model(*batch(seed))
        scores = result["scores"]
        assert scores.dtype is torch.float32 and scores.device.type == "cpu" and scores.is_floating_point()
        del scores, result["scores"]
        result["loss"].backward()
    assert unread(model) == 1


def test_float_is_no_reading():
    """Accelerate calls it on every result of a model in bfloat16."""
    eager, model = pair()
    for m in (eager, model):
        m.to(torch.bfloat16)
    settled(model)
    for seed in range(2 * READS):
        scores = model(*batch(seed))["scores"].float()
        assert type(scores) is UnreadResult and scores.dtype is torch.float32
    torch.testing.assert_close(scores * 1, eager(*batch(seed))["scores"].float(), rtol=2e-2, atol=2e-2)
    assert unread(model) == 1


def test_results_that_are_read_are_computed_again_from_then_on():
    eager, model = pair()
    settled(model)
    for seed in range(READS + 2):
        result, want = model(*batch(seed)), eager(*batch(seed))
        torch.testing.assert_close(result["scores"].sum(), want["scores"].sum(), rtol=1e-4, atol=1e-4)
        assert unread(model) == (seed < READS - 1)
    assert type(model(*batch(1))["scores"]) is torch.Tensor


def test_results_that_are_read_now_and_then_stay_unread():
    _, model = pair()
    settled(model)
    for seed in range(3 * (_unread.QUIET + 1)):
        result = model(*batch(seed))
        if seed % (_unread.QUIET + 1) == 0:
            result["scores"].sum()
        del result
    assert unread(model) == 1


def test_a_result_that_is_held_is_that_of_the_weights_before_the_step():
    eager, model = pair()
    settled(model)
    want = eager(*batch(9))["scores"].detach()
    result = model(*batch(9))
    result["loss"].backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.zero_()
    torch.testing.assert_close(result["scores"].detach(), want, rtol=1e-4, atol=1e-5)


def test_a_result_that_is_read_after_weights_changed():
    _, model = pair()
    settled(model)
    result = model(*batch(9))
    with torch.no_grad():
        next(model.parameters()).zero_()
    with pytest.raises(RuntimeError, match="have changed. Read the result before"):
        result["scores"].sum()


@pytest.mark.parametrize("held", [False, True])
def test_autocast_of_the_step(held):
    """Reading, and backward, come after the region."""
    eager, model = pair()
    seen = []
    for seed in range(STEPS + 3):
        for m in (eager, model):
            with torch.autocast("cpu", torch.bfloat16):
                result = m(*batch(seed))
            if seed < STEPS + 1:
                loss = result["loss"]
                del result
                loss.backward()
            elif held:
                result["loss"].backward()
            if seed > STEPS:
                seen.append(result["scores"].detach())
    assert type(result["scores"]) is UnreadResult
    for want, got in zip(seen[::2], seen[1::2], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_mode_that_has_changed():
    _, model = pair()
    settled(model)
    result = model(*batch(9))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="modes have changed"):
            result["scores"].sum()
    finally:
        torch.use_deterministic_algorithms(False)


def test_backward_of_steps_that_began_before():
    """They tell nothing of results that are left out by then."""
    eager, model = pair()
    old = [model(*batch(seed)) for seed in range(2)]
    settled(model)
    for result in old:
        (result["loss"] + result["scores"].mean()).backward()
    model.zero_grad()
    for m in (eager, model):
        result = m(*batch(9))
        (result["loss"] + result["scores"].mean()).backward()
    same_gradients(model, eager)


def test_results_of_two_steps_before_one_backward():
    eager, model = pair()
    settled(model)
    for m in (eager, model):
        first, second = m(*batch(8)), m(*batch(9))
        (first["loss"] + second["loss"] + first["scores"].mean() * second["scores"].mean()).backward()
    same_gradients(model, eager)


def test_dropout_is_that_of_the_loss_and_the_stream_goes_on():
    _, model = pair(dropout=0.5)
    settled(model)
    assert unread(model) == 1
    drawn = []
    for read in (False, True):
        torch.manual_seed(3)
        result = model(*batch(9))
        if read:
            torch.testing.assert_close(F.cross_entropy(result["scores"], batch(9)[1]), result["loss"])
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_results_that_are_held_at_first_are_not_left_out():
    _, model = pair()
    for seed in range(2 * STEPS):
        result = model(*batch(seed))
        result["loss"].backward()
        assert type(result["scores"]) is torch.Tensor
    assert unread(model) == 0 and onnxtrain.stats(model)["exports"] == 1


def test_results_with_a_gradient_are_not_left_out():
    _, model = pair()
    for seed in range(2 * STEPS):
        result = model(*batch(seed))
        loss = result["loss"] + result.pop("scores").mean()
        del result
        loss.backward()
    assert unread(model) == 0


def test_without_a_gradient_everything_is_computed():
    _, model = pair()
    settled(model)
    with torch.no_grad():
        assert type(model(*batch(1))["scores"]) is torch.Tensor


@pytest.mark.parametrize("name", ["changed buffers", "small results", "disabled", "cut", "in PyTorch"])
def test_where_results_are_not_left_out(name, monkeypatch):
    if name == "disabled":
        monkeypatch.setenv("ONNXTRAIN_DISABLE", "unread")
    if name == "small results":
        monkeypatch.setattr(_unread, "LEAST_ELEMENTS", WORDS * ROWS + 1)
    torch.manual_seed(5)
    module = Head(norm=name == "changed buffers")
    if name in ("cut", "in PyTorch"):
        forward = module.forward

        def changed(x, labels):
            torch._dynamo.graph_break() if name == "cut" else torch.manual_seed(3)
            return forward(x, labels)

        module.forward = changed
    model = settled(ORTModule(module))
    assert unread(model) == 0 and type(model(*batch(1))["scores"]) is torch.Tensor


def test_a_graph_that_does_not_run_without_them(monkeypatch):
    """Such as one that torch's exporters refuse, where the policy makes that an error."""
    def raising(*args):
        raise RuntimeError("none")

    monkeypatch.setattr(dynamo, "_compiled_without", raising)
    eager, model = pair()
    settled(model)
    assert unread(model) == 0 and onnxtrain.stats(model)["fallback_steps"] == 0
    torch.testing.assert_close(loss_alone(model, 9), loss_alone(eager, 9))


def test_code_that_sees_no_python_gets_an_error():
    _, model = pair()
    settled(model)
    scores = model(*batch(9))["scores"]
    with torch._C.DisableTorchFunction(), pytest.raises(RuntimeError, match="was not computed yet"):
        torch.relu(scores)


class Doubled(torch.autograd.Function):
    """torch does not ask a tensor's class about it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone() * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_gradient_of_a_result_that_code_does_not_see_is_an_error():
    """It would be lost: the result that it belongs to stands for another tensor."""
    _, ours = pair()
    settled(ours)
    result = ours(*batch(3))
    with pytest.raises(RuntimeError, match=r"a gradient reaches a result|invalid gradient .* expected shape"):
        (result["loss"] + Doubled.apply(result["scores"]).float().sum()).backward()
    eager, ours = pair()
    settled(ours)
    for model in (eager, ours):
        result = model(*batch(3))
        (result["loss"] + Doubled.apply(result["scores"].clone()).sum()).backward()
    same_gradients(ours, eager)
