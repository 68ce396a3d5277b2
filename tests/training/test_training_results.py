"""Results that a script keeps and reads at the end, of every interface of the trainers."""

import copy

import pytest
import torch
from eager_training import Eager, batches, cross_entropy, options

from onnxtrain.training import ORTTrainer, legacy, optim, step

STEPS, CLASSES, ROWS = 9, 4096, 64  # so many scores that results nobody reads were once left out


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = torch.nn.Linear(8, 16), torch.nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


def newer(module, accumulation, config):
    described = {"inputs": [("x", ["batch", 8]), ("label", ["batch"])],
                 "outputs": [("loss", [], True), ("scores", ["batch", CLASSES])]}
    trainer = ORTTrainer(module, described, config, loss_fn=cross_entropy,
                         options=options(batch={"gradient_accumulation_steps": accumulation}))
    return trainer.train_step, trainer.eval_step


def older(module, accumulation, config):
    described = legacy.ModelDescription(
        [legacy.IODescription("x", ["batch", 8]), legacy.IODescription("label", ["batch"])],
        [legacy.IODescription("loss", []), legacy.IODescription("scores", ["batch", CLASSES])])
    trainer = legacy.ORTTrainer(module, cross_entropy, described, config.name, None,
                                legacy.IODescription("rate", [1]), "cpu", gradient_accumulation_steps=accumulation)
    return lambda *batch: trainer.train_step(*batch, torch.tensor([config.lr])), trainer.eval_step


def stepped(module, accumulation, config):
    assert accumulation == 1 and config.name == "SGDOptimizer"
    trainer = step.trainer(module, cross_entropy, torch.optim.SGD(module.parameters(), lr=config.lr))
    return trainer.step, trainer.evaluate


@pytest.mark.parametrize("form, accumulation, config", [
    (newer, 1, optim.AdamConfig(lr=0.01)), (newer, 3, optim.SGDConfig(lr=0.1)), (older, 1, optim.LambConfig(lr=0.01)),
    (older, 3, optim.SGDConfig(lr=0.1)), (stepped, 1, optim.SGDConfig(lr=0.1))])
def test_everything_is_kept_and_read_at_the_end(form, accumulation, config):
    torch.manual_seed(0)
    module = Wide()
    eager = Eager(module, config, accumulation=accumulation)
    train, evaluate = form(module, accumulation, config)
    kept, wanted = [], []
    for x, label in batches(STEPS, size=ROWS):
        wanted.append(copy.deepcopy(eager.module)(x).detach())
        wanted.append(eager.step(x, label))
        kept.append(train(x, label))
    x, label = batches(1, seed=4, size=ROWS)[0]
    wanted += [eager.module(x).detach(), cross_entropy(eager.module(x), label).detach()]
    kept.append(evaluate(x, label))
    read = [tensor for loss, scores in kept for tensor in (scores, loss)]
    for got, want in zip(read, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert not got.requires_grad
