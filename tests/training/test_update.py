"""Updates of every configuration go as its formula goes, clip to its limit and move tied weights once."""

import pytest
import torch
import torch.nn as nn
from eager_training import Eager, batches, cross_entropy, net, options, trainer_of

import onnxtrain
from onnxtrain.training import ORTTrainer, optim

AFTER = optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
GROUPS = [{"params": ["first.bias", "norm.weight", "norm.bias", "last.bias"], "lambda_coef": 0.0}]
CONFIGS = {
    "sgd": lambda: optim.SGDConfig(lr=0.1),
    "adam": lambda: optim.AdamConfig(lr=1e-3),
    "adam decay": lambda: optim.AdamConfig(GROUPS, lr=1e-3, lambda_coef=0.01),
    "adam after": lambda: optim.AdamConfig(GROUPS, lr=1e-3, lambda_coef=0.01, weight_decay_mode=AFTER),
    "adam uncorrected": lambda: optim.AdamConfig(lr=1e-3, do_bias_correction=False, max_norm_clip=0.1),
    "lamb": lambda: optim.LambConfig(lr=1e-3),
    "lamb decay": lambda: optim.LambConfig(GROUPS, lr=1e-3, lambda_coef=0.01, do_bias_correction=True,
                                           ratio_min=0.1, ratio_max=5.0),
    "limits": lambda: optim.AdamConfig([{"params": ["last.weight"], "max_norm_clip": 0.05}], lr=1e-3),
}


def engine_only(trainer):
    counts = onnxtrain.stats(trainer._trained.model.ort_module)
    assert counts["fallback_steps"] == 0 and counts["engine_steps"], counts


@pytest.mark.parametrize("name", CONFIGS)
def test_two_hundred_steps(name):
    """Two runs from equal weights, left to themselves: each loss within 1e-6 of the other, and the weights at the end."""
    config, module = CONFIGS[name](), net()
    eager, trainer = Eager(module, config), trainer_of(module, config)
    for x, label in batches(200):
        loss, scores = trainer.train_step(x, label)
        assert loss.item() == pytest.approx(eager.step(x, label).item(), rel=1e-6)
        assert scores.shape == (6, 4) and not scores.requires_grad
    engine_only(trainer)
    for (key, ours), theirs in zip(module.named_parameters(), eager.module.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6, msg=key)


def test_clipping_is_on_unless_it_is_turned_off():
    config = optim.AdamConfig(lr=0.01, epsilon=0.1, max_norm_clip=0.01)
    losses = []
    for clip in (True, False):
        module = net()
        eager = Eager(module, config, clip=clip)
        trainer = trainer_of(module, config, utils={"grad_norm_clip": clip})
        for x, label in batches(5):
            losses.append(trainer.train_step(x, label)[0].item())
            assert losses[-1] == pytest.approx(eager.step(x, label).item(), rel=1e-6)
    assert abs(losses[4] - losses[9]) > 1e-3


def test_tied_weights_are_updated_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(4, 8), nn.Linear(8, 4, bias=False)
            self.out.weight = self.table.weight

        def forward(self, x):
            return self.out(self.table(x))

    torch.manual_seed(0)
    module, x = Tied(), torch.tensor([0, 1, 3])
    eager = Eager(module, optim.LambConfig(lr=0.1, lambda_coef=0.1))
    trainer = ORTTrainer(module, {"inputs": [("x", ["n"]), ("label", ["n"])], "outputs": [("loss", [], True)]},
                         optim.LambConfig(lr=0.1, lambda_coef=0.1), loss_fn=cross_entropy, options=options())
    for _ in range(4):
        assert trainer.train_step(x, x).item() == pytest.approx(eager.step(x, x).item(), rel=1e-5)
    assert set(trainer.state_dict()["model"]["full_precision"]) == {"table.weight"}
