"""An ORTModule trained by these optimizers goes where the eager model goes under torch's."""

from __future__ import annotations

import copy

import pytest
import torch

from onnxtrain.optim import SGD, AdamWMode, FusedAdam
from onnxtrain.ortmodule import ORTModule

PAIRS = {
    "adamw": (lambda p: FusedAdam(p, lr=1e-2, eps=1e-8, weight_decay=0.1, adam_w_mode=AdamWMode.ADAMW_TORCH,
                                  max_grad_norm=0.5),
              lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
    "sgd": (lambda p: SGD(p, lr=5e-2, momentum=0.9, nesterov=True, max_grad_norm=0.5),
            lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9, nesterov=True)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_same_training(name, set_to_none):
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.GELU(), torch.nn.LayerNorm(20), torch.nn.Linear(20, 3))
    model = ORTModule(copy.deepcopy(eager))
    ours, theirs = PAIRS[name][0](model.parameters()), PAIRS[name][1](eager.parameters())
    for _step in range(30):
        x, labels = torch.randn(8, 6), torch.randint(3, (8,))
        for m, o in ((model, ours), (eager, theirs)):
            o.zero_grad(set_to_none)
            torch.nn.functional.cross_entropy(m(x), labels).backward()
        norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        theirs.step()
        torch.testing.assert_close(ours.step(), norm, rtol=1e-3, atol=1e-5)
    for p, q in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
