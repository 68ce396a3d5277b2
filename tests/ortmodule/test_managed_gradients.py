"""Parameters that one node holds (ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT=1): gradients, hooks and what backward reaches are
eager's."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn as nn

from onnxtrain import _C
from onnxtrain.optim import FusedAdam
from onnxtrain.ortmodule import ORTModule, _managed_gradients


class Net(nn.Module):
    """Tied weights, one parameter that is frozen, a buffer that changes, two results."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.out, self.frozen = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out.weight = self.fc.weight
        self.alone = nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        y = self.out(torch.tanh(self.norm(self.fc(x))) + self.frozen(x))
        return y, self.alone(x)


@pytest.fixture(autouse=True)
def held(monkeypatch):
    """How many forwards went by one node."""
    monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", "1")
    found = []
    apply = _managed_gradients.HeldFunction.apply
    monkeypatch.setattr(_managed_gradients.HeldFunction, "apply", lambda *args: found.append(1) or apply(*args))
    return found


def pair():
    torch.manual_seed(0)
    eager = Net()
    return eager, ORTModule(copy.deepcopy(eager)), torch.randn(5, 8)


def near(got, want):
    return (got - want).abs().max() <= 1e-5 * (1 + want.abs().max())


def same(ours, eager):
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or near(p.grad, q.grad), name
    for p, q in zip(ours.buffers(), eager.buffers(), strict=True):
        assert near(p, q)


def test_gradients_that_accumulate(held):
    eager, ours, x = pair()
    for _ in range(3):
        for model in (ours, eager):
            y, z = model(x)
            (y.square().sum() + z.sum()).backward()
        same(ours, eager)
    assert len(held) == 3
    assert not any("held" in key for key in ours.state_dict())


def test_results_that_nobody_uses(held):
    eager, ours, x = pair()
    for model in (ours, eager):
        model(x)[1].sum().backward()
    same(ours, eager)
    assert ours.fc.weight.grad is None and len(held) == 1


@pytest.mark.parametrize("way", ["inputs", "grad"])
def test_backward_to_inputs_alone(way, held):
    """Where parameters are not asked for, their .grad stays as it is."""
    eager, ours, x = pair()
    x = x.requires_grad_()
    found = []
    for model in (ours, eager):
        y = model(x)[0].square().sum()
        if way == "grad":
            found.append(torch.autograd.grad(y, x)[0])
        else:
            x.grad = None
            y.backward(inputs=[x])
            found.append(x.grad)
    assert near(*found)
    same(ours, eager)
    assert ours.fc.weight.grad is None and len(held) == 1


def test_parameters_that_are_asked_for_are_an_error():
    _, ours, x = pair()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(ours(x)[0].sum(), list(ours.fc.parameters()))
    with pytest.raises(RuntimeError, match="ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT"):
        ours(x)[0].sum().backward(create_graph=True)


def test_hooks(held):
    eager, ours, x = pair()
    seen = []
    for model in (ours, eager):
        calls = []
        seen.append(calls)
        model.fc.weight.register_hook(lambda g, calls=calls: calls.append(g.clone()))
        model.fc.weight.register_hook(lambda g: g * 2)
        model.fc.bias.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(p.grad.clone()))
        for _ in range(2):
            model(x)[0].square().sum().backward()
    same(ours, eager)
    assert len(seen[0]) == len(seen[1]) == 4 and len(held) == 2
    by_shape = [sorted(calls, key=lambda t: t.dim()) for calls in seen]
    for got, want in zip(*by_shape):
        assert near(got, want)


def test_parameters_that_are_no_leaves_are_arguments(held):
    eager, ours, x = pair()
    found = []
    for model in (ours, eager):
        base = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        scaled = {name: 2 * p for name, p in base.items()}
        torch.func.functional_call(model, scaled, (x,))[0].square().sum().backward()
        found.append(base["out.bias"].grad)
    assert near(*found)
    assert len(held) == 1  # of the engine's call alone: they are arguments of its graph, which autograd sees


def test_changed_weights_are_detected(held):
    _, ours, x = pair()
    loss = ours(x)[0].square().sum()
    with torch.no_grad():
        ours.fc.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert held


def test_training_with_a_scaler_and_fused_adam(held):
    eager, ours, x = pair()
    steps = []
    for model, kind in ((ours, FusedAdam), (eager, torch.optim.AdamW)):
        optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-8, weight_decay=0.01,
                         **({"adam_w_mode": 1} if kind is FusedAdam else {}))
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            y, z = model(x)
            loss = y.square().mean() + z.square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        steps.append(losses)
    assert steps[0] == pytest.approx(steps[1], rel=1e-3) and steps[0][-1] < steps[0][0]
    assert len(held) == 5


def test_nothing_leaks_and_evaluation():
    _, ours, x = pair()

    def once():
        ours(x)[0].square().sum().backward()
        ours(x)  # never differentiated
        ours.zero_grad()
        with torch.no_grad():
            ours(x)

    once()
    before = _C.live_blocks()
    for _ in range(3):
        once()
    assert _C.live_blocks() <= before


def test_data_parallel_training_keeps_autograds_way(tmp_path, held):
    eager, ours, x = pair()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(ours)
        sum(r.square().sum() for r in model(x)).backward()
        # A reducer that outlives the group is the last to hold it, and its destructor waits for gloo's thread with the
        # GIL, which that thread may want (torch 2.13, with any module).
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
    finally:
        torch.distributed.destroy_process_group()
    sum(r.square().sum() for r in eager(x)).backward()
    same(ours, eager)
    assert not held
