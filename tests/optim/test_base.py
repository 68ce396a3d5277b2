"""An optimizer takes the closures, schedulers, groups and arguments that PyTorch's and onnxruntime-training's take."""

from __future__ import annotations

import pytest
import torch
from problem import make_params
from test_step import ALL

from onnxtrain.optim import SGD, AdamWMode, FusedAdam


def test_closure():
    p = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = SGD([p], lr=0.1, max_grad_norm=100.0)

    def closure():
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert p.item() == pytest.approx(2.4) and optimizer.grad_norm == pytest.approx(6.0)


def test_no_gradients_at_all():
    optimizer = FusedAdam(make_params(), max_grad_norm=1.0)
    assert optimizer.step().item() == 0 and not optimizer.state
    assert FusedAdam(make_params()).step() is None


@pytest.mark.parametrize("kind", ALL)
def test_empty_tensors_and_missing_gradients(kind):
    params = [torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.ones(2)),
              torch.nn.Parameter(torch.ones(2))]
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    optimizer = ALL[kind](params)
    optimizer.step()
    assert (params[1] < 1).all() and torch.equal(params[2], torch.ones(2))
    assert params[2] not in optimizer.state or kind == "adagrad"


def test_scheduler_and_scaler_and_groups_see_a_torch_optimizer():
    optimizer = FusedAdam(make_params())
    assert isinstance(optimizer, torch.optim.Optimizer) and "FusedAdam" in repr(optimizer)


def test_arguments_in_the_order_of_onnxruntime_training():
    p = torch.nn.Parameter(torch.ones(3))
    group = FusedAdam([p], 0.5, False, (0.8, 0.9), 1e-3, AdamWMode.ADAMW_TORCH, 0.25, False).param_groups[0]
    assert {key: group[key] for key in ("lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay")} == {
        "lr": 0.5, "bias_correction": False, "betas": (0.8, 0.9), "eps": 1e-3, "adam_w_mode": 2, "weight_decay": 0.25}
    default = FusedAdam([p]).param_groups[0]
    assert (default["lr"], default["betas"], default["eps"], default["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-6, 0.0)
    assert default["adam_w_mode"] == AdamWMode.ADAMW_TRANSFORMERS == 1 and default["bias_correction"] is True
    p.grad = torch.ones(3)
    kept = FusedAdam([p], 0.5, False, (0.8, 0.9), 1e-3, AdamWMode.ADAMW_TORCH, 0.25, False)
    kept.zero_grad()
    assert torch.equal(p.grad, torch.zeros(3)), "set_grad_none=False"
    FusedAdam([p]).zero_grad()
    assert p.grad is None
