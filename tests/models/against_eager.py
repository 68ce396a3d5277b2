"""A model of the zoo through ORTModule beside the same model in eager PyTorch: what differs, and where it ran.

Used by test_transformers.py, which asserts, and by tools/models.py, which writes the table. Every function gives a
Result, whose `problems` are sentences; it does not raise for a difference.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers_zoo import ZOO

import onnxtrain
from onnxtrain.ortmodule import ORTModule

STEPS = 3
CLOSE = dict(loss=2e-6, outputs=1e-5, gradients=1e-4, buffers=1e-5)  # of float32


@dataclasses.dataclass
class Result:
    """Largest relative differences by kind, what is wrong, and what fell back."""

    worst: dict[str, float] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def see(self, kind: str, value: float, limit: float, what: str = "") -> None:
        """Notes a difference; one above the limit, or one that is no number, is a problem."""
        self.worst[kind] = max(self.worst.get(kind, 0.0), value)
        if not value <= limit:
            self.problems.append(f"{what or kind}: {value:.3g}, over {limit:.3g}")

    def ran(self, model: torch.nn.Module, steps: int) -> Result:
        """Every step in the engine, or the reason why not."""
        counts = onnxtrain.stats(model)
        if counts["engine_steps"] != steps or counts["fallback_steps"]:
            self.problems.append(onnxtrain.explain(model))
        return self


def made(name: str, attention: str, where: str, seed: int,
         dropout: float = 0.0) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in train mode and its arguments; no labels where the loss is outside, but a decoder's words."""
    torch.manual_seed(seed)
    module, kwargs = ZOO[name][0](attention, dropout)
    if where == "outside":
        labels = kwargs.get("labels")
        kwargs = {key: value for key, value in kwargs.items() if key not in ("labels", "return_loss")}
        if name in ("t5", "bart", "whisper"):
            kwargs["decoder_input_ids"] = labels
    return module.train(), kwargs


def loss_of(outputs: Any, where: str) -> Tensor:
    """The model's own, or one made of its largest output."""
    if where == "inside":
        return outputs.loss
    logits = getattr(outputs, "logits", None)
    logits = (outputs.logits_per_image if logits is None else logits).float()
    return (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).square().mean() + logits.mean()


def gap(expected: Tensor, got: Tensor, floor: float = 0.0) -> float:
    """The largest difference of an entry over the tensor's largest, or the floor; infinite where kinds differ."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, got) else float("inf")
    if not expected.numel():
        return 0.0
    expected, got = expected.detach().double(), got.detach().double()
    same = (expected == got) | expected.isnan() & got.isnan()
    difference = torch.where(same, 0.0, expected - got).abs().max().item()
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    return difference / max(largest, floor, 1e-30)


def output_gap(expected: Any, got: Any) -> float:
    """Over all tensors of two results of one structure."""
    ours, theirs = pytree.tree_flatten(got), pytree.tree_flatten(expected)
    if ours[1] != theirs[1]:
        return float("inf")
    return max((gap(a, b, 1e-3) for a, b in zip(theirs[0], ours[0], strict=True) if isinstance(a, Tensor)), default=0.0)


def gradient_gap(expected: torch.nn.Module, got: torch.nn.Module) -> float:
    """Over all parameters; a gradient counts as no smaller than a thousandth of the largest of all."""
    grads = [(p.grad, q.grad) for p, q in zip(expected.parameters(), got.parameters(), strict=True)]
    if [a is None for a, _ in grads] != [b is None for _, b in grads]:
        return float("inf")
    floor = 1e-3 * max(a.abs().max().item() for a, _ in grads if a is not None)
    return max(gap(a, b, floor) for a, b in grads if a is not None)


def buffer_gap(expected: torch.nn.Module, got: torch.nn.Module) -> float:
    """Over all buffers."""
    pairs = zip(expected.buffers(), got.buffers(), strict=True)
    return max((gap(a, b, 1e-3) for a, b in pairs), default=0.0)


def step(module: torch.nn.Module, kwargs: dict[str, Any], where: str, autocast: bool = False) -> tuple[Any, Tensor]:
    """Forward and backward; the result and the loss."""
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = module(**kwargs)
    loss = loss_of(outputs, where)
    loss.backward()
    return outputs, loss.detach()


def three_steps(name: str, attention: str, where: str, seed: int = 0) -> Result:
    """float32, no dropout: loss, outputs, gradients and buffers at each of three optimizer steps.

    Each step starts from eager's weights: three steps of a model that trains badly make a thousand roundings of one, as
    many from eager to eager, and a bound of that would be no bound.
    """
    module, kwargs = made(name, attention, where, seed)
    model, result = ORTModule(copy.deepcopy(module)), Result()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for at in range(STEPS):
        (expected, wanted), (got, loss) = (step(m, kwargs, where) for m in (module, model))
        result.see("loss", gap(wanted, loss, 0.1), CLOSE["loss"], f"loss of step {at}")
        result.see("outputs", output_gap(expected, got), CLOSE["outputs"], f"outputs of step {at}")
        result.see("gradients", gradient_gap(module, model), CLOSE["gradients"], f"gradients of step {at}")
        result.see("buffers", buffer_gap(module, model), CLOSE["buffers"], f"buffers of step {at}")
        optimizer.step()
        same_weights(module, model)
    return result.ran(model, STEPS)


def same_weights(module: torch.nn.Module, *others: torch.nn.Module) -> None:
    """Copies the first one's parameters into the others'."""
    with torch.no_grad():
        for first, *rest in zip(*(m.parameters() for m in (module, *others)), strict=True):
            for other in rest:
                other.copy_(first)


def bfloat16(name: str, attention: str, where: str, seed: int = 0) -> Result:
    """Under autocast, the mean of three steps: as far from eager float32 as eager bfloat16 is, twice, as each rounds in
    its own way. The loss is one number, exact by chance: four roundings of it are admitted."""
    module, kwargs = made(name, attention, where, seed)
    half, model, result = copy.deepcopy(module), ORTModule(copy.deepcopy(module)), Result()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    gaps = []
    for _ in range(STEPS):
        exact = step(module, kwargs, where)
        rounded, ours = (step(m, kwargs, where, True) for m in (half, model))
        gaps.append([*(gap(exact[1], other[1].float(), 0.1) for other in (ours, rounded)),
                     *(gradient_gap(module, other) for other in (model, half))])
        optimizer.step()
        same_weights(module, half, model)  # roundings of one step, not what three make of each other
    ours, theirs, our_gradients, their_gradients = (sum(column) / STEPS for column in zip(*gaps))
    result.see("loss", ours, 2 * theirs + 4 * torch.finfo(torch.bfloat16).eps)
    result.see("gradients", our_gradients, 2 * their_gradients + 1e-2)
    return result.ran(model, STEPS)


def dropped(name: str, attention: str, where: str = "inside", draws: int = 80) -> Result:
    """With dropout: loss and gradients have eager's distribution,
    and the gradient is that of the masks that were drawn.
    """
    module, kwargs = made(name, attention, where, 0, dropout=0.2)
    model, result = ORTModule(copy.deepcopy(module)), Result()
    samples = []
    for m in (module, model):
        torch.manual_seed(1)
        drawn = []
        for _ in range(draws):
            loss = step(m, kwargs, where)[1]
            norm = torch.stack([p.grad.square().sum() for p in m.parameters() if p.grad is not None]).sum()
            drawn.append([loss.item(), norm.log().item()])
        samples.append(torch.tensor(drawn, dtype=torch.float64))
    means, variances = [s.mean(0) for s in samples], [s.var(0) for s in samples]
    for k, what in enumerate(("loss", "gradients")):
        if not min(v[k] for v in variances) > 0:
            result.problems.append(f"{what} without any randomness")
            continue
        error = (sum(v[k] for v in variances) / draws).sqrt()
        result.see(what, ((means[0][k] - means[1][k]).abs() / error).item(), 4.0, f"mean of {what}, in standard errors")
        result.see("spread", (variances[1][k] / variances[0][k]).sqrt().log().abs().item(), 0.45,
                   f"logarithm of the spreads of {what}")
    slope_of(model, kwargs, where, result)
    return result.ran(model, draws + 3)


def slope_of(model: torch.nn.Module, kwargs: dict[str, Any], where: str, result: Result) -> None:
    """Backward against a difference of forwards with the same masks, along the gradient."""
    torch.manual_seed(2)
    step(model, kwargs, where)
    moved = [(p, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    length = torch.stack([g.square().sum() for _, g in moved]).sum().sqrt().item()
    ends, reach = [], 1e-3 / length
    for side in (1, -2):
        with torch.no_grad():
            for p, g in moved:
                p.add_(g, alpha=side * reach)
        torch.manual_seed(2)
        ends.append(step(model, kwargs, where)[1].item())
    slope = (ends[0] - ends[1]) / (2 * reach)
    result.see("slope", abs(slope - length ** 2) / length ** 2, 0.03)
