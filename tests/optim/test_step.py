"""What one step does around the rule: closures, clipping, scaling, refusals that touch nothing, versions,
many tensors.
"""

from __future__ import annotations

import pytest
import torch
from problem import Problem, make_params, trajectory
from torch._subclasses import FakeTensorMode

from onnxtrain.optim import SGD, Adagrad, AdamWMode, FusedAdam, Lamb, Lion

ALL = {"adam": FusedAdam, "sgd": SGD, "adagrad": Adagrad, "lamb": Lamb, "lion": Lion}
TORCH = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.01}


def adamw(params, **options):
    return FusedAdam(params, adam_w_mode=AdamWMode.ADAMW_TORCH, **{**TORCH, **options})


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


@pytest.mark.parametrize("limit", [0.05, 1.0, 1e6, 0.0])
def test_clipping_is_torchs_and_leaves_gradients_alone(limit):
    ours, theirs = make_params(), make_params()
    a, b = adamw(ours, max_grad_norm=limit), torch.optim.AdamW(theirs, lr=0.01)
    one, two = Problem(ours), Problem(theirs)
    for _ in range(50):
        one.set_grads()
        two.set_grads()
        expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
        kept = [p.grad.clone() for p in ours]
        norm = a.step()
        b.step()
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
        assert a.grad_norm == pytest.approx(expected.item(), rel=1e-12)
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, kept))
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_of_very_large_and_very_small_gradients(dtype):
    big = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}[dtype]
    small = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 6e-8}[dtype]
    for value in (big, small):
        p = torch.nn.Parameter(torch.zeros(5000, dtype=dtype))
        p.grad = torch.full_like(p, value)
        optimizer = SGD([p], lr=0.0, max_grad_norm=1.0)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(p.grad.double().norm().item(), rel=1e-5)


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


# ---- GradScaler ----

def scaled(make, clip=None, fused_clip=None):
    """float32 training under a scaler whose scale doubles often, so that steps overflow and are skipped."""
    params = make_params(dtype=torch.float32)
    problem, optimizer = Problem(params), make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4)
    skipped, scales = 0, []
    for _ in range(60):
        problem.set_grads()
        for p in params:
            p.grad = scaler.scale(p.grad)
        before = [p.detach().clone() for p in params]
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()
        skipped += all(torch.equal(p, b) for p, b in zip(params, before))
        scales.append(scaler.get_scale())
    return params, skipped, scales


def test_grad_scaler():
    ours, skipped, scales = scaled(adamw)
    theirs, skipped_there, scales_there = scaled(lambda p: torch.optim.AdamW(p, lr=0.01))
    assert skipped == skipped_there and 3 < skipped < 40 and scales == scales_there
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_with_clipping(fused):
    ours, skipped, _ = scaled(lambda p: adamw(p, max_grad_norm=0.5 if fused else None), clip=None if fused else 0.5)
    theirs, skipped_there, _ = scaled(lambda p: torch.optim.AdamW(p, lr=0.01), clip=0.5)
    assert skipped == skipped_there > 3
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_skipped_step_touches_nothing():
    params = make_params()
    optimizer = FusedAdam(params, max_grad_norm=1.0)
    Problem(params).set_grads()
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
    before = [p.detach().clone() for p in params]
    assert optimizer.step() is None and optimizer.grad_norm is None and not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(params, before))


def test_gradients_stay_scaled():
    """found_inf and grad_scale are read in the pass that updates: no gradient is unscaled in memory."""
    params, twins = make_params(dtype=torch.float32), make_params(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    optimizer, twin = adamw(params, max_grad_norm=0.5), adamw(twins, max_grad_norm=0.5)
    one, two = Problem(params), Problem(twins)
    for _ in range(5):
        one.set_grads()
        two.set_grads()
        for p in params:
            p.grad = scaler.scale(p.grad)
        before = [p.grad.clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        twin.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before)) and scaler.get_scale() == 1024
        assert optimizer.grad_norm == pytest.approx(twin.grad_norm, rel=1e-6)
    assert all(map(torch.equal, params, twins)), "a power of two scales exactly"


# ---- refusals ----

@pytest.mark.parametrize("kind", ALL)
def test_sparse_gradients_are_refused_by_name(kind):
    dense, table = torch.nn.Parameter(torch.ones(3)), torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    dense.grad = torch.ones(3)
    optimizer = ALL[kind]([dense, table.weight])
    with pytest.raises(RuntimeError,
                       match=f"{ALL[kind].__name__} does not support sparse gradients.*parameter 1 of group 0"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3)), "nothing was updated"
    assert kind == "adagrad" or dense not in optimizer.state, "and no state was made"
    table.weight.grad = table.weight.grad.to_dense()
    optimizer.step()
    assert (dense < 1).all() and (kind in ("sgd", "lion") or optimizer.state[dense]["step"].item() == 1)


def bad_complex():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    return p


def bad_meta():
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones_like(p)
    return p


def bad_fake():
    """As DTensors: it says that it is on the CPU, and has no memory there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
    return p


@pytest.mark.parametrize("bad", [bad_complex, bad_meta, bad_fake])
def test_other_tensors_are_refused(bad):
    good = torch.nn.Parameter(torch.ones(3))
    good.grad = torch.ones(3)
    with pytest.raises(TypeError, match="SGD: parameter 1 of group 0.* (is complex64|is on meta|no memory of its own)"):
        SGD([good, bad()], lr=1.0).step()
    assert torch.equal(good, torch.ones(3))


def test_shared_memory_is_refused():
    base = torch.ones(10)
    a, b = torch.nn.Parameter(base[:6]), torch.nn.Parameter(base[5:])
    for p in (a, b):
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="parameter number 1.*shares memory with the parameter number 0"):
        SGD([a, b], lr=1.0).step()
    c, d = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    c.grad, d.grad = d.detach(), torch.ones(4)
    with pytest.raises(ValueError, match="the gradient number 0.*shares memory with the parameter number 1"):
        SGD([c, d], lr=1.0).step()
    assert torch.equal(c, torch.ones(4)) and torch.equal(base, torch.ones(10))


def test_overlap_is_seen_whenever_it_arises():
    params = [torch.nn.Parameter(torch.ones(100)) for _ in range(20)]
    optimizer = SGD(params, lr=0.1)
    for step in range(6):
        for p in params:
            p.grad = torch.ones(100)
        if step == 4:
            params[7].grad = params[8].data
        if step == 5:
            params[3].data = params[4].data[:]
        if step < 4:
            optimizer.step()
        else:
            with pytest.raises(ValueError, match="shares memory"):
                optimizer.step()


def test_overlap_is_seen_after_steps_in_which_nothing_moved():
    """Such steps are not looked at again; what changes any operand's place must end that."""
    params = [torch.nn.Parameter(torch.ones(100)) for _ in range(20)]
    for p in params:
        p.grad = torch.ones(100)
    optimizer = FusedAdam(params, lr=0.1)

    def refused(change, mend):
        for _ in range(3):
            optimizer.step()
        change()
        before = [p.detach().clone() for p in params]
        for _ in range(2):
            with pytest.raises(ValueError, match="shares memory"):
                optimizer.step()
        assert all(map(torch.equal, params, before))
        mend()
        optimizer.step()
        assert not any(map(torch.equal, params, before))

    grad, data = params[7].grad, params[3].data
    refused(lambda: setattr(params[7], "grad", params[8].data), lambda: setattr(params[7], "grad", grad))
    refused(lambda: setattr(params[3], "data", params[4].data), lambda: setattr(params[3], "data", data))
    moment = optimizer.state[params[5]]["exp_avg"]
    refused(lambda: optimizer.state[params[5]].update(exp_avg=optimizer.state[params[6]]["exp_avg_sq"]),
            lambda: optimizer.state[params[5]].update(exp_avg=moment))
    refused(lambda: setattr(params[9], "grad", optimizer.state[params[2]]["exp_avg"]),
            lambda: setattr(params[9], "grad", torch.ones(100)))


def test_interleaved_columns_and_shared_gradients_are_fine():
    base, grad = torch.ones(8, 2), torch.ones(8)
    a, b = torch.nn.Parameter(base[:, 0]), torch.nn.Parameter(base[:, 1])
    a.grad = b.grad = grad
    SGD([a, b], lr=0.5).step()
    assert torch.equal(base, torch.full((8, 2), 0.5))
    c = torch.nn.Parameter(torch.ones(4))
    c.grad = c.detach()
    SGD([c], lr=0.25).step()
    assert torch.equal(c, torch.full((4,), 0.75))


def test_state_that_does_not_fit_is_refused():
    for change, message in ((lambda s: s.update(exp_avg=torch.zeros(2)), "the first state has another shape"),
                            (lambda s: s.update(exp_avg=torch.zeros(3, dtype=torch.int64)), "the first state is int64"),
                            (lambda s: s.update(step=torch.zeros(2)), "its step is not a float32 or float64 number")):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optimizer = FusedAdam([p])
        optimizer.step()
        before = p.detach().clone()
        change(optimizer.state[p])
        with pytest.raises((ValueError, TypeError), match=message):
            optimizer.step()
        assert torch.equal(p, before)


# ---- the step's surroundings ----

def test_in_place_change_is_seen_by_autograd():
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    version = p._version
    SGD([p], lr=0.1).step()
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_versions_of_many_parameters_count_up_by_one_each():
    params = [torch.nn.Parameter(torch.ones(i % 5)) for i in range(333)]
    for i, p in enumerate(params):
        p.grad = None if i % 7 == 3 else torch.ones_like(p)
    optimizer = FusedAdam(params)
    for _step in range(3):
        before = [p._version for p in params]
        optimizer.step()
        assert [p._version - v for p, v in zip(params, before)] == [0 if i % 7 == 3 else 1 for i in range(333)]


def test_memory_that_changes_under_an_object_is_seen():
    """Objects stay, but their memory, size, dtype or order becomes another one: by set_, resize_, .data and swap."""
    def changes(p, state):
        yield lambda: p.set_(torch.linspace(1, 2, 12).view(3, 4))
        yield lambda: p.grad.set_(torch.linspace(-1, 1, 12).view(3, 4))
        yield lambda: state["exp_avg"].set_(torch.full((3, 4), 0.25))
        yield lambda: setattr(p, "data", torch.linspace(1, 3, 12).view(4, 3).t())
        yield lambda: setattr(p.grad, "data", torch.linspace(-2, 1, 12).view(4, 3).t())
        every_second = torch.linspace(0, 1, 24, dtype=torch.float64).view(3, 8)[:, ::2]
        yield lambda: setattr(state["exp_avg_sq"], "data", every_second)
        yield lambda: state["step"].set_(torch.tensor(7.0))
        yield lambda: p.untyped_storage().resize_(1 << 16)
        yield lambda: torch.utils.swap_tensors(state["exp_avg"], torch.full((3, 4), 0.5))

    def drive(cls, **options):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        p.grad = torch.full((3, 4), 0.5)
        optimizer = cls([p], lr=0.01, **options)
        for _ in range(2):
            optimizer.step()
        trail = []
        for change in changes(p, optimizer.state[p]):
            with torch.no_grad():
                change()
            for _ in range(2):
                optimizer.step()
                trail.append(p.detach().clone())
        return trail

    ours = drive(FusedAdam, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH, weight_decay=0.01)
    theirs = drive(torch.optim.AdamW, foreach=False)
    assert len(ours) == 18
    for i, (a, b) in enumerate(zip(ours, theirs)):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6, msg=lambda m: f"after {i // 2 + 1} changes: {m}")
    p = torch.nn.Parameter(torch.ones(6))
    p.grad = torch.ones(6)
    optimizer = FusedAdam([p])
    optimizer.step()
    p.data = torch.ones(4)
    with pytest.raises(ValueError, match="the gradient has another shape than the parameter"):
        optimizer.step()


def test_replaced_tensors_are_followed():
    """Parameters, gradients and state may be other objects or memory at every step."""
    ours, theirs = make_params(), make_params()
    a, b = adamw(ours), torch.optim.AdamW(theirs, lr=0.01)
    one, two = Problem(ours), Problem(theirs)
    for step in range(30):
        one.set_grads()
        two.set_grads()
        if step % 5 == 1:
            for p in ours:
                p.data = p.data.clone()
        if step % 5 == 2:
            for p in ours:
                a.state[p] = {k: v.clone() for k, v in a.state[p].items()}
        if step % 5 == 3:
            a.state[ours[1]]["exp_avg"] = a.state[ours[1]]["exp_avg"].clone()
        if step == 14:
            for optimizer, params in ((a, ours), (b, theirs)):
                del optimizer.state[params[2]]
        if step == 20:
            ours[0].grad = theirs[0].grad = None
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_thousands_of_tensors_in_groups():
    shapes = [(i % 37 + 1,) for i in range(3000)]
    ours, theirs = make_params(dtype=torch.float64, shapes=shapes), make_params(dtype=torch.float64, shapes=shapes)
    a = adamw([{"params": ours[i::7], "lr": 0.01 * (i + 1)} for i in range(7)])
    b = torch.optim.AdamW([{"params": theirs[i::7], "lr": 0.01 * (i + 1)} for i in range(7)])
    for step in range(3):
        for i, (p, q) in enumerate(zip(ours, theirs)):
            p.grad = q.grad = (None if (i + step) % 11 == 0
                               else torch.sin(torch.arange(p.numel(), dtype=torch.float64) + i))
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ALL)
def test_one_call_of_the_core_for_all_groups(kind):
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    params = [torch.nn.Parameter(torch.ones(i % 9 + 1, dtype=dtypes[i % 4])) for i in range(400)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = ALL[kind]([{"params": params[i::5], "lr": 0.1 * (i + 1)} for i in range(5)])
    updater, calls = optimizer._updater, []

    class Counted:
        def step(self, *args):
            calls.append(args)
            return updater.step(*args)

    optimizer._updater = Counted()
    for steps in (1, 2):
        optimizer.step()
        assert len(calls) == steps
    assert all((p < 1).all() for p in params)


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


def test_step_inside_a_step_is_refused():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = FusedAdam([p])
    prepare = optimizer._prepare

    def again(*args):
        optimizer._run(-1.0, 1.0)
        return prepare(*args)

    optimizer._prepare = again
    with pytest.raises(RuntimeError, match="already running"):
        optimizer.step()


def test_same_trajectory_with_and_without_gradient_views():
    """A gradient that is a slice of a bucket, as DDP makes them."""
    def bucketed(optimizer, _):
        params = optimizer.param_groups[0]["params"]
        flat = torch.cat([p.grad.flatten() for p in params])
        at = 0
        for p in params:
            p.grad = flat[at:at + p.numel()].view_as(p)
            at += p.numel()

    for a, b in zip(trajectory(adamw, torch.float32, 20, bucketed), trajectory(adamw, torch.float32, 20)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"momentum": 0.9},
                                     {"scale": float("inf")}], ids=str)
def test_sgd_where_most_rows_of_a_gradient_are_zero(options, dtype):
    """An embedding's: such rows keep every bit as far as torch's do; a penalty or an infinite factor reaches them."""
    ours, theirs = make_params(dtype=dtype, shapes=[(300, 100)]), make_params(dtype=dtype, shapes=[(300, 100)])
    grad = torch.zeros(300, 100, dtype=dtype)
    grad[[3, 117, 118, 299]] = torch.randn(4, 100).to(dtype)
    grad[7, 3] = -0.0
    for p in (*ours, *theirs):
        p.grad = grad.clone()
        with torch.no_grad():
            p[20], p[21, :3] = -0.0, torch.tensor([torch.inf, -torch.inf, torch.nan])
    before = ours[0].detach().clone()
    options = {"lr": 0.1, **options}
    scale = options.pop("scale", 1.0)
    optimizer = SGD(ours, **options)
    optimizer.next_unscale = scale
    optimizer.step()
    theirs[0].grad *= scale
    torch.optim.SGD(theirs, **options).step()
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    still = (grad == 0).all(1)
    if scale == 1 and "weight_decay" not in options:
        same = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        still[7] = still[20] = False  # a zero's sign: of what rounds the same way
        assert torch.equal(ours[0][still].view(same), before[still].view(same))
        assert torch.equal(ours[0][20], before[20])
