"""state_dict both ways with torch, copies, pickles, upstream's checkpoints, 8-bit state on its way out and in."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from problem import Problem, make_params
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onnxtrain.optim import SGD, Adagrad, AdamWMode, FusedAdam, Lamb, Lion

T = AdamWMode.ADAMW_TORCH
PAIRS = {
    "adamw": (lambda p: FusedAdam(p, lr=0.01, eps=1e-8, adam_w_mode=T, weight_decay=0.1),
              lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "amsgrad": (lambda p: FusedAdam(p, lr=0.01, eps=1e-8, adam_w_mode=T, weight_decay=0.1, amsgrad=True),
                lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True)),
    "sgd": (lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1)),
    "adagrad": (lambda p: Adagrad(p, initial_accumulator_value=0.1),
                lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1)),
}
OURS = {**{name: pair[0] for name, pair in PAIRS.items()},
        "lamb": lambda p: Lamb(p, lr=0.01, weight_decay=0.1), "lion": lambda p: Lion(p, lr=0.001, weight_decay=0.1),
        "int8": lambda p: FusedAdam(p, lr=0.01, state_dtype="int8")}


def drive(params, optimizer, problem, steps):
    for _ in range(steps):
        problem.set_grads()
        optimizer.step()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("through_file", [True, False])
@pytest.mark.parametrize("before", [0, 20])
def test_interchange_with_torch(name, ours_first, through_file, before):
    first, second = PAIRS[name] if ours_first else PAIRS[name][::-1]
    params, straight = make_params(), make_params()
    problem, reference = Problem(params), Problem(straight)
    drive(straight, PAIRS[name][1](straight), reference, before + 30)
    optimizer = first(params)
    drive(params, optimizer, problem, before)
    saved = optimizer.state_dict()
    if through_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    other = second(params)
    other.load_state_dict(saved)
    drive(params, other, problem, 30)
    for a, b in zip(params, straight):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_hyperparameters_come_with_the_dict_and_options_stay():
    params = make_params(dtype=torch.bfloat16)
    saved = torch.optim.AdamW(params, lr=0.5, betas=(0.1, 0.2), weight_decay=0.3).state_dict()
    optimizer = FusedAdam([{"params": params, "master_weights": True}])
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.5 and group["betas"] == (0.1, 0.2) and group["weight_decay"] == 0.3 and group["eps"] == 1e-8
    assert group["adam_w_mode"] == AdamWMode.ADAMW_TORCH and group["master_weights"] and group["bias_correction"]


def test_loading_copies():
    params = make_params()
    a, b = FusedAdam(params), FusedAdam(params)
    drive(params, a, Problem(params), 3)
    b.load_state_dict(a.state_dict())
    for p in params:
        for key, value in b.state[p].items():
            assert torch.equal(value, a.state[p][key]) and value.data_ptr() != a.state[p][key].data_ptr(), key


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_copies_go_on_alike(name, how):
    params = make_params(dtype=torch.float32)
    problem = Problem(params)
    optimizer = OURS[name](params)
    drive(params, optimizer, problem, 5)
    if how == "state_dict":
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        twin = OURS[name](twins)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        twins = twin.param_groups[0]["params"]
    for _ in range(5):
        problem.set_grads()
        for p, q in zip(params, twins):
            q.grad = p.grad.clone()
        optimizer.step()
        twin.step()
    for p, q in zip(params, twins):
        assert p is not q
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6 if name == "int8" else 0)


def test_attributes_are_copied():
    optimizer = FusedAdam(make_params(), max_grad_norm=2.0, set_grad_none=False)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.max_grad_norm == 2.0 and twin._set_grad_none is False
        for p in twin.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        twin.zero_grad()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in twin.param_groups[0]["params"])


def test_checkpoint_of_onnxruntime_training():
    """It counts steps per group, as an int, and has neither mode nor options in it."""
    params, straight = make_params(), make_params()
    problem, reference = Problem(params), Problem(straight)
    optimizer = FusedAdam(params, lr=0.01, weight_decay=0.1)
    drive(params, optimizer, problem, 7)
    drive(straight, FusedAdam(straight, lr=0.01, weight_decay=0.1), reference, 12)
    state = optimizer.state_dict()
    old = {"state": {k: {n: v[n] for n in ("exp_avg", "exp_avg_sq")} for k, v in state["state"].items()},
           "param_groups": [{"lr": 0.01, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6,
                             "weight_decay": 0.1, "step": 7, "params": state["param_groups"][0]["params"]}]}
    fresh = FusedAdam(params)
    fresh.load_state_dict(old)
    assert "step" not in fresh.param_groups[0] and fresh.state[params[0]]["step"].item() == 7
    drive(params, fresh, problem, 5)
    for a, b in zip(params, straight):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_numbers_as_steps():
    """As torch saved them before 1.12."""
    params = make_params()
    optimizer = FusedAdam(params)
    drive(params, optimizer, Problem(params), 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for held in saved["state"].values():
        held["step"] = int(held["step"])
    optimizer.load_state_dict(saved)
    drive(params, optimizer, Problem(params), 1)
    assert optimizer.state[params[0]]["step"].item() == 4


def test_narrow_state_is_kept_as_it_was():
    """torch.optim would round float32 moments and master copies to the parameter's dtype."""
    params = make_params(dtype=torch.bfloat16)
    optimizer = FusedAdam(params, master_weights=True)
    drive(params, optimizer, Problem(params), 3)
    twin = FusedAdam(params, master_weights=True)
    twin.load_state_dict(optimizer.state_dict())
    for p in params:
        assert twin.state[p].keys() == optimizer.state[p].keys()
        for key, value in optimizer.state[p].items():
            assert twin.state[p][key].dtype == torch.float32 and torch.equal(twin.state[p][key], value), key


def test_int8_state_leaves_as_float32_for_torch_and_comes_back():
    params = make_params(dtype=torch.float32, shapes=[(1000,), (33, 17)])
    optimizer = FusedAdam(params, state_dtype="int8")
    drive(params, optimizer, Problem(params), 4)
    saved = optimizer.state_dict()
    for held in saved["state"].values():
        assert held.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(value.dtype == torch.float32 for value in held.values())
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.int8, "the optimizer's own is untouched"
    peer = torch.optim.AdamW(params)
    peer.load_state_dict(copy.deepcopy(saved))
    peer.step()
    back = FusedAdam(params, state_dtype="int8")
    back.load_state_dict(saved)
    for p in params:
        assert torch.equal(back.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
        assert torch.equal(back.state[p]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
        torch.testing.assert_close(back.state[p]["exp_avg_scale"], optimizer.state[p]["exp_avg_scale"], rtol=1e-6,
                                   atol=0)


def test_what_is_refused():
    params = make_params()
    saved = torch.optim.AdamW(params).state_dict()
    saved["param_groups"][0]["differentiable"] = True
    with pytest.raises(ValueError, match="FusedAdam does not support differentiable"):
        FusedAdam(params).load_state_dict(saved)
    with pytest.raises(ValueError, match="doesn't match the size"):
        FusedAdam(params).load_state_dict(FusedAdam(params[:2]).state_dict())


@pytest.mark.parametrize("make", [
    lambda p: FusedAdam(p, lr=-1.0), lambda p: FusedAdam(p, lr=float("nan")), lambda p: FusedAdam(p, betas=(1.0, 0.9)),
    lambda p: FusedAdam(p, betas=(0.9, -0.1)), lambda p: FusedAdam(p, eps=-1e-8),
    lambda p: FusedAdam(p, weight_decay=-1),
    lambda p: FusedAdam(p, adam_w_mode=7), lambda p: FusedAdam(p, state_dtype="int4"),
    lambda p: FusedAdam(p, max_grad_norm=-1.0),
    lambda p: FusedAdam(p, state_dtype=torch.float16),
    lambda p: FusedAdam(p, master_weights=True, stochastic_rounding=True),
    lambda p: SGD(p, lr=-1), lambda p: SGD(p, momentum=-1), lambda p: SGD(p, nesterov=True),
    lambda p: SGD(p, nesterov=True, momentum=0.9, dampening=0.1), lambda p: Adagrad(p, lr_decay=-1),
    lambda p: Lion(p, betas=(0.9, 1.0)),
    lambda p: Lamb(p, ratio_min=2.0, ratio_max=1.0),
])
def test_hyperparameters_out_of_range(make):
    with pytest.raises(ValueError):
        make(make_params())


def test_hooks_of_all_optimizers_and_the_profiler_see_a_step():
    """Without them a step goes past torch's wrapper."""
    model = torch.nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    seen = []
    hooks = [register(lambda o, *_, name=name: seen.append((o, name))) for name, register in (
        ("before", register_optimizer_step_pre_hook),
        ("after", register_optimizer_step_post_hook))]
    try:
        optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    optimizer.step()
    assert seen == [(optimizer, "before"), (optimizer, "after")]
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}


def test_hooks_and_names():
    model = torch.nn.Linear(3, 2)
    optimizer = FusedAdam(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[model.weight]["exp_avg"].dtype))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert seen == ["before", "after"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[-1] == torch.float32
