"""Models of `transformers` in small, through ORTModule against eager: three optimizer steps each.

Loss, every gradient and every buffer, with labels in the graph and with the loss outside, in float32 and under bfloat16
autocast; every step in the engine, or a reason by name. A run takes a sample by a printed seed; ONNXTRAIN_SLOW=1 takes all.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parent))
import onnxtrain  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402
from transformers_zoo import ZOO, gpt2  # noqa: E402

# Workers of one run must collect the same cases.
SEED = int(os.environ.get("ONNXTRAIN_MODELS_SEED") or random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(2**31))
EVERY = [(name, attention, where) for name, (_, attentions) in ZOO.items() for attention in attentions
         for where in ("inside", "outside")]
CASES = EVERY if os.environ.get("ONNXTRAIN_SLOW") == "1" else sorted(random.Random(SEED).sample(EVERY, 6))
print(f"ONNXTRAIN_MODELS_SEED={SEED}: {len(CASES)} of {len(EVERY)} models")


def loss_of(outputs: Any, where: str) -> torch.Tensor:
    """The model's own, or one made of its largest output."""
    if where == "inside":
        return outputs.loss
    logits = getattr(outputs, "logits", None)
    logits = outputs.logits_per_image if logits is None else logits
    return (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).square().mean() + logits.mean()


def arguments(name: str, kwargs: dict[str, Any], where: str) -> dict[str, Any]:
    """Without labels where the loss is outside; models of two halves take the second's words instead."""
    if where == "inside":
        return kwargs
    rest = {key: value for key, value in kwargs.items() if key not in ("labels", "return_loss")}
    if name in ("t5", "bart", "whisper"):
        rest["decoder_input_ids"] = kwargs["labels"]
    return rest


def distance(expected: torch.nn.Module, got: torch.nn.Module) -> float:
    """The largest difference of a gradient's entry, over that gradient's largest, or a thousandth of all gradients' largest."""
    grads = [(p.grad, q.grad) for p, q in zip(expected.parameters(), got.parameters(), strict=True)]
    assert [a is None for a, _ in grads] == [b is None for _, b in grads], "a gradient that is there on one side only"
    largest = max(a.abs().max().item() for a, _ in grads if a is not None)
    return max(((a - b).abs().max() / max(a.abs().max().item(), 1e-3 * largest)).item() for a, b in grads if a is not None)


@pytest.mark.parametrize("name, attention, where", CASES, ids=["-".join(case) for case in CASES])
def test_three_steps(name, attention, where):
    torch.manual_seed(SEED % 1000)
    module, kwargs = ZOO[name][0](attention)
    module.train()
    kwargs = arguments(name, kwargs, where)
    model = ORTModule(copy.deepcopy(module))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (module, model)]
    for _ in range(3):
        losses = []
        for m, optimizer in zip((module, model), optimizers):
            optimizer.zero_grad()
            loss = loss_of(m(**kwargs), where)
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5, abs=1e-6)
        assert distance(module, model) < 1e-4
        for (label, a), b in zip(module.named_buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=label)
        for optimizer in optimizers:
            optimizer.step()
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 3 and counts["fallback_steps"] == 0, onnxtrain.explain(model)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"] if len(CASES) < len(EVERY) else list(ZOO))
def test_bfloat16_autocast(name):
    """Within the tolerance that eager in bfloat16 has to eager in float32, twice: both round, each in its own way."""
    torch.manual_seed(SEED % 1000)
    module, kwargs = ZOO[name][0](ZOO[name][1][0])
    half, model = copy.deepcopy(module), ORTModule(copy.deepcopy(module))
    exact = module(**kwargs).loss
    exact.backward()
    losses = []
    for m in (half, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(**kwargs).loss
        loss.backward()
        losses.append(loss.item())
    theirs, ours = (abs(loss - exact.item()) for loss in losses)
    assert ours <= 2 * theirs + 2e-3 * abs(exact.item()), (exact.item(), losses)
    assert distance(module, model) <= 2 * distance(module, half) + 1e-2
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] + counts["fallback_steps"] == 1 and not counts["fallback_steps"], onnxtrain.explain(model)


def test_dropout_has_the_distribution_of_torch():
    """Means of the loss over many draws differ by no more than four standard errors."""
    torch.manual_seed(0)
    module, kwargs = gpt2("sdpa", dropout=0.2)
    module.train()
    model = ORTModule(copy.deepcopy(module))
    with torch.no_grad():
        draws = [torch.tensor([m(**kwargs).loss.item() for _ in range(150)]) for m in (module, model)]
    error = torch.stack([d.var() / len(d) for d in draws]).sum().sqrt()
    assert draws[0].std() > 0 and draws[1].std() > 0
    assert abs(draws[0].mean() - draws[1].mean()) < 4 * error, [(d.mean(), d.std()) for d in draws]
    assert draws[1].std().item() == pytest.approx(draws[0].std().item(), rel=0.35)
