"""Real models in small, through ORTModule against eager: three steps each, in train and eval mode, training in float64 too.

Loss, every output, every gradient (inputs included) and every buffer must agree, and every step must have run in the engine.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import onnxtrain  # noqa: E402
import zoo  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

# Of the largest entry of a tensor. In float32 two orders of summation are compared; float64 shows what is a defect.
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-9}


def images(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def tokens(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, 30, shape),)


def classify(outputs: Any) -> Tensor:
    return F.cross_entropy(outputs, torch.arange(len(outputs)) % outputs.shape[1])


def next_token(outputs: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), torch.arange(outputs.shape[0] * outputs.shape[1]) % outputs.shape[2])


def pixels(outputs: Any) -> Tensor:
    return F.cross_entropy(outputs, torch.arange(outputs[:, 0].numel()).view_as(outputs[:, 0]) % outputs.shape[1])


def squares(outputs: Any) -> Tensor:
    return (outputs * torch.linspace(-1, 1, outputs.numel()).to(outputs).view_as(outputs)).square().mean() + outputs.mean()


def real_or_not(outputs: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, torch.ones_like(outputs))


def elbo(outputs: Any) -> Tensor:
    image, mean, logvar = outputs
    target = torch.linspace(0, 1, image.numel()).to(image).view_as(image)
    return F.binary_cross_entropy(image, target, reduction="sum") - 0.5 * (1 + logvar - mean.square() - logvar.exp()).sum()


def both_sides(outputs: Any) -> Tensor:
    real, fake, fooled = (o.float() for o in outputs)
    entropy = F.binary_cross_entropy_with_logits
    return entropy(real, torch.ones_like(real)) + entropy(fake, torch.zeros_like(fake)) + entropy(fooled, torch.ones_like(fooled))


def a_graph() -> tuple[Tensor, ...]:
    """Four graphs of 12 nodes in all, 30 edges; some targets have none, some many."""
    return torch.randn(12, 5), torch.randint(0, 11, (2, 30)), torch.arange(12) // 3


def of_lengths() -> tuple[Tensor, ...]:
    return torch.randint(0, 30, (3, 7)), torch.tensor([5, 7, 2])


@dataclasses.dataclass
class Model:
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Any], Tensor]
    engine: bool = True  # else it falls back, and says why


MODELS = {
    "resnet50": Model(zoo.ResNet50, images(4, 3, 32, 32), classify),
    "dcgan-pair": Model(zoo.GAN, lambda: (torch.randn(4, 8, 1, 1), torch.randn(4, 3, 32, 32)), both_sides),
    "lstm-packed": Model(zoo.PackedLM, of_lengths, next_token, engine=False),
    "gru-packed": Model(lambda: zoo.PackedLM(nn.GRU, layers=1), of_lengths, next_token, engine=False),
    "graph": Model(zoo.GraphNet, a_graph, classify),
    "checkpoint": Model(zoo.CheckpointedTransformer, tokens(3, 7), next_token),
    "checkpoint-reentrant": Model(lambda: zoo.CheckpointedTransformer(True), tokens(3, 7), next_token),
    "resnet18": Model(zoo.ResNet18, images(4, 3, 32, 32), classify),
    "mobilenet": Model(zoo.MobileNet, images(4, 3, 24, 24), classify),
    "vgg": Model(zoo.VGG, images(3, 3, 32, 32), classify),
    "groupnorm": Model(zoo.GroupNormCNN, images(3, 3, 16, 16), classify),
    "convnext": Model(zoo.ConvNeXt, images(3, 3, 32, 32), classify),
    "vit": Model(zoo.ViT, images(3, 3, 32, 32), classify),
    "unet": Model(zoo.UNet, images(2, 3, 16, 24), pixels),
    "unet-bilinear": Model(lambda: zoo.UNet(bilinear=True), images(2, 3, 16, 24), pixels),
    "dcgan-generator": Model(zoo.Generator, images(4, 8, 1, 1), squares),
    "dcgan-discriminator": Model(zoo.Discriminator, images(4, 3, 32, 32), real_or_not),
    "vae": Model(zoo.VAE, lambda: (torch.rand(3, 1, 16, 16), torch.randn(3, 6)), elbo),
    "style": Model(zoo.StyleNet, images(2, 3, 12, 16), squares),
    "super-resolution": Model(zoo.SuperResolution, images(2, 3, 9, 7), squares),
    "spatial-transformer": Model(zoo.SpatialTransformer, images(3, 1, 16, 16), classify),
    "lstm": Model(zoo.RecurrentLM, tokens(3, 7), next_token),
    "lstm-bidirectional": Model(lambda: zoo.RecurrentLM(nn.LSTM, layers=1, bidirectional=True), tokens(3, 7), next_token),
    "gru": Model(lambda: zoo.RecurrentLM(nn.GRU), tokens(3, 7), next_token),
    "rnn": Model(lambda: zoo.RecurrentLM(nn.RNN, layers=1), tokens(3, 7), next_token),
    "wavenet": Model(zoo.WaveNet, images(2, 1, 20), squares),
    "video": Model(zoo.VideoNet, images(2, 2, 5, 8, 10), classify),
    "patches": Model(zoo.PatchNet, images(2, 3, 12, 12), squares),
}


def assert_same(ours: Tensor | None, eager: Tensor | None, what: str, scale: float = 0.0) -> None:
    assert (ours is None) == (eager is None), what
    if eager is None:
        return
    assert ours.shape == eager.shape and ours.dtype == eager.dtype, what
    if not eager.is_floating_point():
        assert torch.equal(ours, eager), what
        return
    assert torch.isfinite(eager).all(), f"{what}: eager is not finite"
    largest = max(eager.abs().max().item() if eager.numel() else 0.0, scale)
    error = (ours - eager).abs().max().item() if eager.numel() else 0.0
    assert error <= TOLERANCE[eager.dtype] * max(largest, 1e-6), f"{what}: error {error:.3g}, largest entry {largest:.3g}"


def flat(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def step(model: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[[Any], Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    model.zero_grad()
    outputs = model(*leaves)
    value = loss(outputs)
    value.backward()
    return value.detach(), [o.detach() for o in flat(outputs)], [x.grad for x in leaves]


@pytest.mark.parametrize("training, dtype", [(True, torch.float32), (False, torch.float32), (True, torch.float64)],
                         ids=["train-float32", "eval-float32", "train-float64"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, training: bool, dtype: torch.dtype) -> None:
    model = MODELS[name]
    torch.manual_seed(0)
    eager = model.make().to(dtype).train(training)
    ours = ORTModule(copy.deepcopy(eager))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (eager, ours)]
    for k in range(3):
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in model.data())
        ours.load_state_dict(eager.state_dict())  # each step by itself: differences of rounding do not add up
        want_loss, want, want_inputs = step(eager, inputs, model.loss)
        got_loss, got, got_inputs = step(ours, inputs, model.loss)
        assert_same(got_loss, want_loss, f"step {k}: loss")
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"step {k}: output {i}")
        for i, (a, b) in enumerate(zip(got_inputs, want_inputs, strict=True)):
            assert_same(a, b, f"step {k}: gradient of input {i}")
        # A bias in front of a normalisation has no gradient but rounding: the model's largest is the measure.
        largest = max(p.grad.abs().max().item() for p in eager.parameters() if p.grad is not None)
        for (parameter, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
            assert_same(q.grad, p.grad, f"step {k}: gradient of {parameter}", 1e-2 * largest)
        for (buffer, a), b in zip(eager.named_buffers(), ours.buffers(), strict=True):
            assert_same(b, a, f"step {k}: buffer {buffer}", 1e-2)  # a mean of normalised entries is rounding
        for optimizer in optimizers:
            optimizer.step()
    counts = onnxtrain.stats(ours)
    assert counts["engine_steps"] == 3 and counts["fallback_steps"] == 0, counts["reasons"]
    assert counts["exports"] == 1, "one export serves all steps"
