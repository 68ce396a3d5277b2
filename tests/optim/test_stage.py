"""A step over any mix of dtypes and strides equals that of the same optimizer in double, from the same point."""

from __future__ import annotations

import itertools

import pytest
import torch
from problem import Problem, make_params

from onnxtrain.optim import SGD, Adagrad, AdamWMode, FusedAdam, Lamb, Lion

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)
MAKERS = {
    "adam": lambda p, **o: FusedAdam(p, lr=0.01, weight_decay=0.1, adam_w_mode=AdamWMode.ADAMW_TORCH, **o),
    "adam l2 amsgrad": lambda p, **o: FusedAdam(p, lr=0.01, weight_decay=0.1,
                                                adam_w_mode=AdamWMode.ADAM_L2_REGULARIZATION,
                                                amsgrad=True, **o),
    "sgd": lambda p, **o: SGD(p, lr=0.01, weight_decay=0.1, **o),
    "sgd nesterov": lambda p, **o: SGD(p, lr=0.01, momentum=0.9, nesterov=True, **o),
    "adagrad": lambda p, **o: Adagrad(p, lr=0.05, weight_decay=0.1, **o),
    "lamb": lambda p, **o: Lamb(p, lr=0.02, weight_decay=0.1, **o),
    "lion": lambda p, **o: Lion(p, lr=0.01, betas=(0.75, 0.9375), weight_decay=0.1, **o),
}


def peer_of(name, optimizer, params):
    """The same in double: parameters (or their master copies), state and gradients as they are now."""
    masters = [optimizer.state[p].get("master_param", p) if p in optimizer.state else p for p in params]
    twins = [torch.nn.Parameter(m.detach().double().clone()) for m in masters]
    for twin, p in zip(twins, params):
        twin.grad = p.grad.double()
    peer = MAKERS[name](twins)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group.update(master_weights=False, state_dtype=None)
    peer.load_state_dict(saved)
    peer.step()
    return twins, peer


def assert_rounded(got, exact, dtype, where, slack=0.0):
    """`got` is `exact` rounded once, after float32 (double) arithmetic of some rounding errors."""
    info = torch.finfo(dtype)
    arithmetic = 1e-13 if dtype == torch.float64 else 3e-6
    allowed = exact.abs() * (0.5 * info.eps * (dtype in NARROW) + arithmetic) + info.smallest_normal * info.eps
    allowed += slack + (1e-15 if dtype == torch.float64 else 1e-7)
    error = (got.double() - exact).abs()
    assert bool((error <= allowed).all()), f"{where}: off by {(error / allowed).max().item():.2f} of what is allowed"


def compare(name, optimizer, params, steps=4, grad_dtypes=None):
    problem = Problem(params)
    for step in range(steps):
        problem.set_grads()
        for p, dtype in zip(params, grad_dtypes or [p.dtype for p in params]):
            if dtype != p.dtype:
                p.grad = None
                p.grad_dtype = dtype
                p.grad = torch.randn(p.shape).to(dtype)
        twins, peer = peer_of(name, optimizer, params)
        optimizer.step()
        for i, (p, twin) in enumerate(zip(params, twins)):
            where = f"{name} step {step} parameter {i} {p.dtype}"
            master = optimizer.state[p].get("master_param")
            # LAMB's second pass takes the moments as they are stored: a step of 0.02 |p| with their rounding error
            stored = {value.dtype for key, value in optimizer.state[p].items() if key.startswith("exp_avg")}
            slack = 0.1 * torch.finfo(max(stored, key=lambda d: torch.finfo(d).eps)).eps if name == "lamb" else 0.0
            if master is None:
                assert_rounded(p.detach(), twin.detach(), p.dtype, where, slack)
            else:
                assert_rounded(master, twin.detach(), torch.float32, where, slack)
                assert torch.equal(p.detach(), master.to(p.dtype)), where
            for key, value in optimizer.state[p].items():
                if key not in ("step", "master_param"):
                    assert_rounded(value, peer.state[twin][key], value.dtype, f"{where} {key}")
                elif key == "step":
                    assert value.item() == step + 1


@pytest.mark.parametrize("name", MAKERS)
def test_all_mixes_in_one_group(name):
    torch.manual_seed(0)
    mixes = list(itertools.product(DTYPES, DTYPES))
    params = [make_params(i, dtype, [(17, 5)])[0] for i, (dtype, _) in enumerate(mixes)]
    compare(name, MAKERS[name](params), params, grad_dtypes=[grad for _, grad in mixes])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", NARROW)
def test_master_weights(name, dtype):
    params = make_params(0, dtype) + make_params(1, torch.float32)
    optimizer = MAKERS[name](params, master_weights=True)
    compare(name, optimizer, params)
    for p in params:
        state = optimizer.state[p]
        assert ("master_param" in state) == (p.dtype == dtype)
        assert all(value.dtype == torch.float32 for value in state.values())


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_dtype(name, dtype, state_dtype):
    params = make_params(0, dtype)
    optimizer = MAKERS[name](params, state_dtype=state_dtype)
    compare(name, optimizer, params)
    for p in params:
        held = {key: value for key, value in optimizer.state[p].items() if key != "step"}
        assert all(value.dtype == state_dtype for value in held.values())


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", NARROW)
def test_master_weights_beside_float64_state(name, dtype):
    """The update runs in double, the copy is float32."""
    params = make_params(0, dtype)
    optimizer = MAKERS[name](params, master_weights=True, state_dtype=torch.float64)
    compare(name, optimizer, params)
    for p in params:
        assert optimizer.state[p]["master_param"].dtype == torch.float32


def test_master_weights_follow_a_write_to_the_parameter():
    p = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = SGD([p], lr=1e-4, master_weights=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones_like(p)), "too small for bfloat16"
    for _ in range(60):
        optimizer.step()
    assert p[0].item() < 1, "but the copy has summed it up"
    with torch.no_grad():
        p[:100] = 5.0
    optimizer.step()
    assert optimizer.state[p]["master_param"][0].item() == pytest.approx(5 - 1e-4, abs=5e-6)
    assert optimizer.state[p]["master_param"][200].item() == pytest.approx(1 - 62e-4, abs=5e-6)


@pytest.mark.parametrize("size", [65_536, 65_535, 1])
@pytest.mark.parametrize("offset", [0, 1])
def test_all_bfloat16_numbers_pass_the_loops_unchanged(size, offset):
    """Two are taken at once there, and NaN has no case of its own; odd numbers of them, and odd addresses."""
    patterns = torch.arange(-32_768, 32_768, dtype=torch.int32).flip(0).to(torch.int16)[:size]
    memory = torch.zeros(size + 1, dtype=torch.int16)[offset:][:size].copy_(patterns)
    values = memory.view(torch.bfloat16)
    nan = torch.isnan(values)

    def same(a, b):
        assert torch.equal(torch.isnan(a), nan)
        assert torch.equal(a.view(torch.int16)[~nan], b.view(torch.int16)[~nan])

    p = torch.nn.Parameter(values.clone().as_strided((size,), (1,)) if not offset else values)
    p.grad = torch.zeros(size, dtype=torch.bfloat16)
    before = p.detach().clone()
    SGD([p], lr=1.0).step()
    same(p.detach(), before)
    Adagrad([p], lr=1.0).step()  # 0 / (sqrt(0) + eps)
    same(p.detach(), before)
    q = torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))
    q.grad = before
    optimizer = SGD([q], lr=1.0, momentum=0.5, maximize=True)
    optimizer.step()
    same((q.detach() + 0).abs(), before.abs())
    same(optimizer.state[q]["momentum_buffer"].abs(), before.abs())


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("any_bits", [False, True])
def test_adam_in_bfloat16_is_the_same_in_long_and_short_tensors(mode, any_bits):
    """32 elements at a time have a loop of their own; tensors of 31 do not reach it. Any bits: infinities, NaN,
    subnormals.
    """
    generator = torch.Generator().manual_seed(mode)
    count = 31 * 32 * 50

    def draw():
        if any_bits:
            return torch.randint(-2**15, 2**15, (count,), dtype=torch.int16, generator=generator).view(torch.bfloat16)
        return torch.randn(count, generator=generator).bfloat16()

    start, grad, mean, square = draw(), draw(), draw(), draw()
    square = square if any_bits else square.abs()

    def stepped(size):
        params = [torch.nn.Parameter(part.clone()) for part in start.split(size)]
        optimizer = FusedAdam(params, lr=0.01, weight_decay=0.1, adam_w_mode=mode, eps=1e-8)
        for p, g, m, v in zip(params, grad.split(size), mean.split(size), square.split(size)):
            p.grad = g.clone()
            optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        optimizer.step()
        parts = [params, *([optimizer.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))]
        return [torch.cat([t.detach() for t in part]) for part in parts]

    for a, b in zip(stepped(count), stepped(31)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(stepped(count)[0], start)


def test_infinities_and_nan_come_through():
    for dtype, kind in itertools.product(DTYPES, (float("inf"), float("-inf"), float("nan"))):
        for name, make in MAKERS.items():
            p = torch.nn.Parameter(torch.ones(40, dtype=dtype))
            p.grad = torch.full_like(p, 0.5)
            p.grad[3] = kind
            make([p]).step()
            assert name == "lion" and kind == kind or not torch.isfinite(p[3]), (name, dtype, kind)
            if name != "lamb":  # whose norm takes all of the tensor along
                assert torch.isfinite(torch.cat([p[:3], p[4:]])).all(), (name, dtype, kind)


def test_float16_extremes():
    """Subnormals and the largest numbers are rounded as torch rounds them."""
    values = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[torch.isfinite(values)]
    p = torch.nn.Parameter(values.clone())
    p.grad = torch.full_like(p, 0.25)
    SGD([p], lr=2.0**-20).step()
    expected = (values.float() - 0.25 * 2.0**-20).to(torch.float16)
    assert torch.equal(p.detach(), expected)


# ---- strides ----

def strided(kind, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 8, 10, 12, generator=generator).to(dtype)
    return {
        "contiguous": lambda: base,
        "transposed": lambda: base.transpose(0, 3),
        "channels last": lambda: base.contiguous(memory_format=torch.channels_last),
        "every second": lambda: base[:, ::2, :, 1::3],
        "one column": lambda: base[:, :, :, 4],
        "permuted slice": lambda: base.permute(2, 0, 3, 1)[1:7, :, ::2],
        "dims of one": lambda: base[:, 3:4].transpose(0, 1),
    }[kind]()


KINDS = ("contiguous", "transposed", "channels last", "every second", "one column", "permuted slice", "dims of one")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("grad_kind", ["same", "row major", "reversed dims"])
def test_strides(name, kind, grad_kind):
    view = strided(kind)
    memory = view.untyped_storage()
    before = torch.tensor([], dtype=torch.float32).set_(memory).clone()
    p, q = torch.nn.Parameter(view), torch.nn.Parameter(view.detach().clone(memory_format=torch.contiguous_format))
    a, b = MAKERS[name]([p]), MAKERS[name]([q])
    assert p.data_ptr() == view.data_ptr() and p.stride() == view.stride()
    for seed in range(3):
        g = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed))
        q.grad = g.clone(memory_format=torch.contiguous_format)
        if grad_kind == "same":
            p.grad = torch.empty_strided(p.shape, p.stride()).copy_(g) if kind != "contiguous" else g.clone()
        elif grad_kind == "row major":
            p.grad = g.clone(memory_format=torch.contiguous_format)
        else:
            p.grad = torch.empty(g.shape[::-1]).permute(*reversed(range(g.ndim))).copy_(g)
        a.step()
        b.step()
        torch.testing.assert_close(p, q, rtol=0 if name != "lamb" else 1e-6, atol=0 if name != "lamb" else 1e-7)
    after = torch.tensor([], dtype=torch.float32).set_(memory)
    touched = torch.zeros(after.shape, dtype=torch.bool)
    touched.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    assert torch.equal(after[~touched], before[~touched]), "wrote outside the parameter"


def test_expanded_parameter_is_refused():
    p = torch.nn.Parameter(torch.zeros(1, 4).expand(3, 4))
    p.grad = torch.ones(3, 4)
    with pytest.raises(ValueError, match="overlaps itself"):
        SGD([p], lr=0.1).step()
    assert torch.equal(p, torch.zeros(3, 4))


def test_expanded_gradient():
    p = torch.nn.Parameter(torch.zeros(3, 4))
    p.sum().backward()
    p.grad = torch.tensor(2.0).expand(3, 4)
    SGD([p], lr=0.5).step()
    assert torch.equal(p, -torch.ones(3, 4))
