"""The quick walk over plain tensors gives the careful one's numbers, and refuses whatever stops being plain."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from problem import make_params

from onnxtrain.optim import SGD, Adagrad, FusedAdam, Lamb, Lion

SHAPES = [(i % 41 + 1,) for i in range(150)] + [()] + [(3, 70), (2, 3, 4, 5, 2, 2), (70_001,)]
RULES = {"adam": FusedAdam, "amsgrad": lambda p: FusedAdam(p, amsgrad=True, weight_decay=0.1, adam_w_mode=0),
         "clipped": lambda p: FusedAdam(p, max_grad_norm=1.0), "sgd": lambda p: SGD(p, lr=0.1),
         "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "adagrad": Adagrad, "lamb": Lamb,
         "lion": Lion}


def set_grads(params, step: int, dtype: torch.dtype) -> None:
    for i, p in enumerate(params):
        missing = i > 1 and (i + step) % 13 == 0
        p.grad = (None if missing
                  else torch.cos(torch.arange(p.numel(), dtype=torch.float64) + i + step).to(dtype).view_as(p))


def quick_steps(optimizer) -> int:
    return optimizer._updater.walks()[1]


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


CASES = [(name, dtype, 1) for name in RULES for dtype in (torch.float32, torch.bfloat16, torch.float64)]
CASES += [("clipped", torch.float32, 2)]


@pytest.mark.parametrize(("name", "dtype", "threads"), CASES, indirect=["threads"])
def test_same_numbers_as_the_careful_walk(name, dtype, threads):
    """A parameter that is no contiguous tensor makes the other optimizer walk carefully."""
    quick, careful = make_params(dtype=dtype, shapes=SHAPES), make_params(dtype=dtype, shapes=SHAPES)
    turned = torch.nn.Parameter(torch.ones(2, 3, dtype=dtype).t())
    cut = len(quick) // 3
    a = RULES[name]([{"params": quick[:cut], "lr": 0.01}, {"params": []}, {"params": quick[cut:]}])
    b = RULES[name]([{"params": careful[:cut], "lr": 0.01}, {"params": []}, {"params": [*careful[cut:], turned]}])
    for step in range(6):
        set_grads(quick, 0 if step < 4 else step, dtype)  # later other parameters have no gradient, and new ones appear
        set_grads(careful, 0 if step < 4 else step, dtype)
        turned.grad = torch.zeros_like(turned)
        versions = [p._version for p in quick]
        assert a.step() == b.step()
        assert [p._version - v for p, v in zip(quick, versions)] == [p.grad is not None for p in quick]
    assert quick_steps(a) >= 3 and quick_steps(b) == 0
    assert all(map(torch.equal, quick, careful))
    for p, q in zip(quick, careful):
        assert a.state[p].keys() == b.state[q].keys() if p in a.state else q not in b.state
        assert all(torch.equal(a.state[p][key], b.state[q][key]) for key in a.state.get(p, {}))


def plain(count: int = 300):
    params = make_params(dtype=torch.float32, shapes=[(i % 7 + 2,) for i in range(count)])
    set_grads(params, 0, torch.float32)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = FusedAdam(params)
    for _ in range(3):
        optimizer.step()
    assert quick_steps(optimizer) == 2
    return params, optimizer


def test_a_gradient_of_one_element_that_is_a_negative_view():
    """Memory holds -2 where the gradient is 2: the careful walk refuses it by name."""
    p = torch.nn.Parameter(torch.ones(()))
    optimizer = SGD([p], lr=0.5)
    for _ in range(3):
        p.grad = torch.ones(())
        optimizer.step()
    assert quick_steps(optimizer) == 2 and p.item() == -0.5
    p.grad = torch.complex(torch.tensor(0.0), torch.tensor(-2.0)).conj().imag
    assert p.grad.is_neg() and p.grad.item() == 2
    with pytest.raises(TypeError, match="resolve_neg"):
        optimizer.step()
    assert p.item() == -0.5


def sparse(p, state):
    p.grad = torch.ones(p.shape).to_sparse()


def meta(p, state):
    state["exp_avg_sq"] = torch.ones(p.shape, device="meta")


def other_shape(p, state):
    p.data = torch.ones(99)


def whole_numbers(p, state):
    state["exp_avg"].data = torch.ones(p.shape, dtype=torch.int32)


def shared(p, state):
    p.grad = state["exp_avg_sq"]


def no_step(p, state):
    state["step"] = torch.zeros(3)


@pytest.mark.parametrize("change", [sparse, meta, other_shape, whole_numbers, shared, no_step])
def test_what_becomes_odd_is_refused_and_nothing_is_touched(change):
    params, optimizer = plain()
    with torch.no_grad():
        change(params[250], optimizer.state[params[250]])
    before = [p.detach().clone() for p in params]
    counts = [float(optimizer.state[p]["step"]) for p in params[:200]]
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError, ValueError), match="FusedAdam: .*25[01]|parameter 250|number 250"):
            optimizer.step()
    assert all(map(torch.equal, params, before))
    assert counts == [float(optimizer.state[p]["step"]) for p in params[:200]]


def test_state_replaced_while_there_is_no_gradient():
    """The dict that the optimizer knew is gone when the parameter comes back."""
    params, optimizer = plain(40)
    twins = copy.deepcopy(params)
    twin = FusedAdam(twins)
    twin.load_state_dict(optimizer.state_dict())
    for p in twins:
        p.grad = torch.ones_like(p)
    for own, other in ((params, optimizer), (twins, twin)):
        own[7].grad = None
        if other is optimizer:
            other.state[own[7]] = {key: value.clone() for key, value in other.state[own[7]].items()}
            gc.collect()
            keep = [{"step": torch.zeros(2), "exp_avg": i} for i in range(50)]  # takes the old dict's place
        other.step()
        other.step()
        own[7].grad = torch.ones_like(own[7])
        for _ in range(3):
            other.step()
    assert len(keep) == 50 and all(map(torch.equal, params, twins))


def test_other_sizes_dtypes_and_places_are_followed():
    params, optimizer = plain(20)
    optimizer.param_groups[0]["lr"] = 0.1
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        p = params[11]
        p.grad = None
        p.data = torch.full((5, 3), 2.0, dtype=dtype)
        p.grad = torch.ones(5, 3, dtype=dtype)
        optimizer.state[p] = {"step": torch.tensor(4.0), "exp_avg": torch.zeros(5, 3), "exp_avg_sq": torch.zeros(5, 3)}
        for _ in range(3):
            optimizer.step()
        assert float(optimizer.state[p]["step"]) == 7 and (p < 2).all()
    assert quick_steps(optimizer) > 2


def test_parameters_that_come_and_go():
    params, optimizer = plain(50)
    gone = optimizer.param_groups[0]["params"][20:]
    del optimizer.param_groups[0]["params"][20:]
    before, steps = [p.detach().clone() for p in gone], quick_steps(optimizer)
    for _ in range(40):
        optimizer.step()
    assert quick_steps(optimizer) > steps and all(map(torch.equal, gone, before))
    optimizer.add_param_group({"params": gone, "lr": 0.5})
    steps = quick_steps(optimizer)
    for _ in range(40):
        optimizer.step()
    assert quick_steps(optimizer) > steps and not any(map(torch.equal, gone, before))


def test_parameters_of_inference_mode():
    """They count no versions, and torch's own function for that ends the process where it is not asked first."""
    params, optimizer = plain(30)
    with torch.inference_mode():
        made = torch.ones(6)
    late = torch.nn.Parameter(made, requires_grad=False)
    late.grad = torch.ones(6)
    optimizer.add_param_group({"params": [late]})
    for _ in range(3):
        optimizer.step()
    assert (late < 1).all() and float(optimizer.state[late]["step"]) == 3


def test_another_thread_replaces_state():
    """Not gradients: torch itself crashes where one thread reads p.grad while another sets it."""
    params, optimizer = plain(400)
    stop = threading.Event()

    def meddle():
        while not stop.is_set():
            for p in params[::7]:
                optimizer.state[p] = {key: value.clone() for key, value in optimizer.state[p].items()}

    thread = threading.Thread(target=meddle)
    thread.start()
    try:
        for _ in range(100):
            optimizer.step()
    finally:
        stop.set()
        thread.join()
    assert all(torch.isfinite(p).all() for p in params)
