"""Steps of the optimizer classes on a device, against those on the CPU: dtypes, 8-bit states, random rounding, orders
of memory, the step in backward, rates and scales on the device.

    python tests/cuda/optim_steps.py PLUGIN DEVICE [part/parts]

Prints what checks.py says.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import sys
from collections.abc import Callable, Sequence

import in_backward
import torch
from checks import close, every_nth, refusal, run_checks
from torch import Tensor

import onnxtrain
from onnxtrain import _C
from onnxtrain.optim import SGD as Momentum
from onnxtrain.optim import Adagrad, FusedAdam, Lamb, Lion, _base
from onnxtrain.ortmodule import ORTModule, _runner

CHUNK = 16384
LIBRARY: ctypes.CDLL
PLACE = DEVICE = "cpu"

MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p, **o: FusedAdam(p, lr=1e-2, weight_decay=0.1, **o),
    "adam l2 amsgrad": lambda p, **o: FusedAdam(p, lr=1e-2, weight_decay=0.1, adam_w_mode=0, amsgrad=True, **o),
    "sgd": lambda p, **o: Momentum(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, **o),
    "sgd nesterov": lambda p, **o: Momentum(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "sgd plain": lambda p, **o: Momentum(p, lr=0.1, **o),
    "adagrad": lambda p, **o: Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.02, **o),
    "lamb": lambda p, **o: Lamb(p, 1e-2, weight_decay=0.01, **o),
    "lion": lambda p, **o: Lion(p, 1e-2, **o),
}


SMALL = ((5, 7), (300,), (1,), (0,))


def pair(make: Callable[..., torch.optim.Optimizer], kinds: list[torch.dtype],
         shapes: Sequence[tuple[int, ...]] = SMALL, **options: object) -> list[torch.optim.Optimizer]:
    """The same optimizer on the CPU and on the device, with two groups: tensors of every kind in the first,
    one at an address that is not aligned in the second.
    """
    made = []
    for where in ("cpu", PLACE):
        torch.manual_seed(3)
        params = [torch.randn(shape).to(where, kind).requires_grad_() for kind in kinds for shape in shapes]
        odd = torch.randn(34).to(where, kinds[0])[1:].requires_grad_()
        made.append(make([{"params": params}, {"params": [odd], "lr": 3e-3}], **options))
    return made


def give(optimizers: list[torch.optim.Optimizer], step: int) -> None:
    for optimizer in optimizers:
        torch.manual_seed(50 + step)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape).to(p.device, p.dtype)
        if step == 1:
            optimizer.param_groups[0]["params"][0].grad = None


def trajectory(optimizers: list[torch.optim.Optimizer], what: str, steps: int = 4) -> None:
    for step in range(steps):
        give(optimizers, step)
        norms = []
        for optimizer, device in zip(optimizers, ("", DEVICE), strict=True):
            _base.device_of = lambda _, device=device: device
            norms.append(optimizer.step())
        assert (norms[0] is None) == (norms[1] is None), what
        assert norms[0] is None or torch.allclose(norms[0], norms[1].cpu(), rtol=1e-5), (what, norms)
        for a, b in zip(*(sum((g["params"] for g in o.param_groups), []) for o in optimizers), strict=True):
            assert close(a, b, a.dtype), (what, step, a.dtype, (a - b.cpu()).abs().max())
            states = [o.state[p] for o, p in zip(optimizers, (a, b), strict=True)]
            assert states[0].keys() == states[1].keys(), what
            for name, value in states[0].items():
                assert close(value, states[1][name], a.dtype), (what, step, name)


def classes() -> None:
    """Every optimizer class on the device as on the CPU: dtypes side by side, master weights, clipping, two groups."""
    every = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    for name, make in MAKERS.items():
        for kinds, options in ((every, {}), ([torch.bfloat16, torch.float16], {"master_weights": True}),
                               ([torch.float32], {"max_grad_norm": 2.0}),
                               ([torch.float32, torch.float64], {"maximize": True})):
            trajectory(pair(make, kinds, **options), f"{name} {options}")


def is_exact() -> bool:
    """Whether both sides round each product and each sum: the emulation and the loops of ONNXTRAIN_ISA=plain do."""
    return PLACE == "cpu" and _C.build_info()["isa"] == "plain"


def agrees(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether tensors of the CPU and the device agree. `dtype`: of the parameter. LAMB's norms of float64 parameters
    are sums whose last bits depend on the order.
    """
    if (is_exact() and dtype != torch.float64) or a.numel() == 0:
        return torch.equal(a.nan_to_num(7), b.cpu().nan_to_num(7))
    if a.dtype in (torch.int8, torch.uint8):
        return int((a.int() - b.cpu().int()).abs().max()) <= 1
    return close(a, b, dtype)


def from_equal_states(optimizers: list[torch.optim.Optimizer], what: str, bad: float | None = None,
                      steps: int = 4) -> None:
    """Steps on both devices, each from the CPU's parameters and states: every bit the same where both round alike, and
    otherwise 8-bit states to within one level and random rounding to within one unit.
    """
    params = [sum((g["params"] for g in o.param_groups), []) for o in optimizers]
    for step in range(steps):
        give(optimizers, step)
        for (a, b), optimizer in itertools.product(zip(*params, strict=True), optimizers[1:]):
            if bad is not None and step == 2 and a.grad is not None and a.numel() > 1:
                a.grad.view(-1)[1] = b.grad.view(-1)[1] = bad
            b.data.copy_(a.data)
            for name, value in optimizers[0].state.get(a, {}).items():
                optimizer.state[b][name].copy_(value)
        for optimizer, device in zip(optimizers, ("", DEVICE), strict=True):
            _base.device_of = lambda _, device=device: device
            optimizer.step()
        for a, b in zip(*params, strict=True):
            assert agrees(a, b, a.dtype), (what, step, a.dtype, a.shape)
            states = [o.state[p] for o, p in zip(optimizers, (a, b), strict=True)]
            assert states[0].keys() == states[1].keys(), what
            for name, value in states[0].items():
                assert agrees(value, states[1][name], a.dtype), (what, step, name, a.dtype, a.shape)


LONG = (*SMALL, (CHUNK + 300,))


def eight_bits() -> None:
    """8-bit states of every rule that has them: short blocks, several chunks, all dtypes side by side, values that are
    not finite.
    """
    halves, every = [torch.bfloat16, torch.float16], [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    for name in ("adam", "adam l2 amsgrad", "sgd", "sgd nesterov", "adagrad", "lamb", "lion"):
        for kinds, options in ((every, {}), (halves, {"master_weights": True}),
                               (halves, {"stochastic_rounding": True})):
            made = pair(MAKERS[name], kinds, LONG, state_dtype="int8", **options)
            from_equal_states(made, f"{name} {options}")
            kept = {value.dtype for held in made[1].state.values() for value in held.values()}
            assert kept & {torch.int8, torch.uint8}, name
        for bad in (math.inf, math.nan):
            from_equal_states(pair(MAKERS[name], [torch.float32], LONG, state_dtype="int8"), f"{name} {bad}", bad)


def written_parameters() -> None:
    """What other code has written to a 16-bit parameter replaces its float32 copy, as on the CPU."""
    for name, state_dtype in itertools.product(MAKERS, (None, "int8")):
        if name == "lamb" and not state_dtype:
            continue  # its sums are in another order; below
        made = pair(MAKERS[name], [torch.bfloat16, torch.float16], master_weights=True, state_dtype=state_dtype)
        from_equal_states(made, name, steps=2)
        for optimizer in made:
            for p in optimizer.param_groups[0]["params"]:
                p.data.view(-1)[:20] = 5.0
        from_equal_states(made, f"{name} {state_dtype}, written", steps=2)
        first = made[1].param_groups[0]["params"][1]
        assert (made[1].state[first]["master_param"][:20] - 5).abs().max() < 1.5, name
    made = pair(MAKERS["lamb"], [torch.bfloat16, torch.float16], master_weights=True)
    trajectory(made, "lamb", steps=2)
    for optimizer in made:
        for p in optimizer.param_groups[0]["params"]:
            p.data.view(-1)[:20] = 5.0
    trajectory(made, "lamb, written", steps=2)


def eight_bit_memory() -> None:
    """A trajectory with 8-bit states on the device alone, saved as float32 and loaded again, goes on as it was."""
    first, second = pair(MAKERS["adam"], [torch.float32], LONG, state_dtype="int8")
    _base.device_of = lambda _: DEVICE
    for step in range(3):
        give([second], step)
        second.step()
    saved = second.state_dict()
    assert all(v.dtype == torch.float32 for held in saved["state"].values() for v in held.values())
    fresh = pair(MAKERS["adam"], [torch.float32], LONG, state_dtype="int8")[1]
    fresh.load_state_dict(saved)
    for a, b in zip(*(sum((g["params"] for g in o.param_groups), []) for o in (second, fresh)), strict=True):
        b.data.copy_(a.data)
        for name, value in second.state.get(a, {}).items():
            assert agrees(value.cpu(), fresh.state[b][name], torch.float32), name


def random_rounding() -> None:
    """Random rounding with the numbers of the CPU: neighbours of the exact value, the same for the same key, other ones
    in the next step.
    """
    halves = [torch.bfloat16, torch.float16]
    for name in MAKERS:
        from_equal_states(pair(MAKERS[name], halves, LONG, stochastic_rounding=True), name)
        from_equal_states(pair(MAKERS[name], halves, stochastic_rounding=True, state_dtype=torch.float32), name)
    for bad in (math.inf, -math.inf, math.nan):
        from_equal_states(pair(MAKERS["adam"], halves, stochastic_rounding=True), f"{bad}", bad)
    for kind, tiny in ((torch.bfloat16, 1e-39), (torch.float16, 3e-6), (torch.float16, 70000.0)):
        made = pair(MAKERS["sgd plain"], [kind], ((300,),), stochastic_rounding=True)
        for optimizer in made:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.data.mul_(tiny)
        from_equal_states(made, f"{kind} {tiny}")
    _base.device_of = lambda _: DEVICE
    moved = []
    for _ in range(3):
        p = torch.ones(4000, dtype=torch.bfloat16, device=PLACE, requires_grad=True)
        optimizer = Momentum([p], lr=1e-4, stochastic_rounding=True)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            before = p.detach().clone()
            optimizer.step()
            moved.append((before != p).nonzero().flatten().tolist())
        assert 0.9975 < p.detach().float().mean() < 0.9985, "the mean is not exact"
    assert moved[:20] == moved[20:40] == moved[40:] and all(moved[i] != moved[i + 1] for i in range(19))


def random_rounding_is_not_captured() -> None:
    """A captured step would repeat its random key: it is refused."""
    _base.device_of = lambda _: DEVICE
    p = torch.ones(40, dtype=torch.bfloat16, device=PLACE, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p], stochastic_rounding=True)
    optimizer.step()
    before = p.detach().clone()
    if PLACE == "cuda":
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            said = refusal(optimizer.step)
    else:
        LIBRARY.ont_emulate_capture_begin()
        said = refusal(optimizer.step)
        LIBRARY.ont_emulate_capture_end()
    assert "captures this stream" in said and "stochastic_rounding" in said, said
    assert torch.equal(p, before)
    optimizer.step()


IN_BACKWARD: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **in_backward.OPTIMIZERS, "amsgrad": MAKERS["adam l2 amsgrad"],
    "random": lambda p: Momentum(p, lr=0.01, momentum=0.9, stochastic_rounding=True),
    "random adam": lambda p: FusedAdam(p, lr=0.01, stochastic_rounding=True, state_dtype="int8"),
    "master": lambda p: FusedAdam(p, lr=0.01, master_weights=True),
    "rate on the device": lambda p: FusedAdam(p, lr=torch.tensor(0.01, device=PLACE))}


class Images(torch.nn.Module):
    """Weights in another order than their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Linear(8 * 36, 40)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.out.weight.data = self.out.weight.data.T.contiguous().T

    def forward(self, tokens: Tensor) -> Tensor:
        x = (tokens.float().reshape(-1, 1, 1, 1) / 40).expand(-1, 3, 6, 6)
        return self.out(torch.relu(self.conv(x)).flatten(1)).view(*tokens.shape, 40)


@torch.enable_grad()
def step_in_backward() -> None:
    """Every bit as backward and then step() have it, on the device; which updates one parameter after the other, while
    backward runs.
    """
    _base.device_of = lambda _: DEVICE
    before, _runner.device_of = _runner.device_of, lambda tensors: DEVICE
    try:
        for make, kind, names in ((in_backward.Net, torch.float32, IN_BACKWARD),
                                  (Images, torch.float32, ("adam", "lamb")),
                                  (in_backward.Net, torch.bfloat16, ("random", "random adam", "master"))):
            torch.manual_seed(0)
            module = make().to(PLACE, kind)
            models = [ORTModule(copy.deepcopy(module)) for _ in range(2)]
            for name in names:
                pairs = [(model, IN_BACKWARD[name](model.parameters())) for model in models]
                bond = onnxtrain.optim.step_in_backward(pairs[0][1], models[0])
                for step in range(3):
                    tokens = torch.randint(40, (4, 5), device=PLACE)
                    for model, optimizer in pairs:
                        in_backward.loss_of(model, tokens).backward()
                        if model is models[0]:
                            assert all(p.grad is None for p in model.parameters()), (name, step)
                            assert len(optimizer._in_backward.updated) == (4 if make is Images else 11), (name, step)
                        optimizer.step()
                        optimizer.zero_grad()
                    in_backward.same(*models, pairs[0][1], pairs[1][1])
                bond.remove()
            for model in models:
                counts = onnxtrain.stats(model)
                assert counts["fallback_steps"] == 0, counts["reasons"]
    finally:
        _runner.device_of = before


def groups_without_elements() -> None:
    """Steps of a group whose tensors are all empty count, as on the CPU."""
    for make, device in itertools.product((MAKERS["adam"], MAKERS["lamb"]), ("", DEVICE)):
        _base.device_of = lambda _, device=device: device
        optimizer = make([torch.zeros(0, device=PLACE if device else "cpu", requires_grad=True)])
        for _ in range(3):
            optimizer.param_groups[0]["params"][0].grad = torch.zeros(0, device=PLACE if device else "cpu")
            optimizer.step()
        assert [held["step"].item() for held in optimizer.state.values()] == [3.0], device


def rates_on_the_device() -> None:
    """A rate that is a tensor on the device is read there."""
    pair_of = pair(MAKERS["adam"], [torch.float32])
    for group in pair_of[1].param_groups:
        group["lr"] = torch.tensor(group["lr"], device=PLACE)
    number = _base.number
    _base.number = lambda value: 1e9 if isinstance(value, Tensor) else value  # nobody may ask for it
    try:
        trajectory(pair_of, "rate")
    finally:
        _base.number = number


def scaler() -> None:
    """GradScaler's numbers: gradients are divided on the device, an infinity skips the step and its count there."""
    for name, bad in itertools.product(("adam", "sgd", "lamb"), (False, True)):
        optimizers = pair(MAKERS[name], [torch.float32, torch.float16], max_grad_norm=1.0)
        trajectory(optimizers, name)
        for optimizer, device in zip(optimizers, ("", DEVICE), strict=True):
            _base.device_of = lambda _, device=device: device
            give([optimizer], 7)
            optimizer.found_inf = torch.tensor(float(bad), device=PLACE)
            optimizer.grad_scale = torch.tensor(8.0, device=PLACE)
            before = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
            optimizer.step()
            now = [p for g in optimizer.param_groups for p in g["params"]]
            assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True)) == bad, (name, bad, device)
        for a, b in zip(*(sum((g["params"] for g in o.param_groups), []) for o in optimizers), strict=True):
            assert close(a, b, a.dtype), (name, bad)
            for key, value in optimizers[0].state[a].items():
                assert close(value, optimizers[1].state[b][key], a.dtype), (name, bad, key)


def saved_and_loaded() -> None:
    """A state dict of the CPU's goes on on the device."""
    first, second = pair(MAKERS["adam"], [torch.float32])
    trajectory([first, second], "before")
    _, fresh = pair(MAKERS["adam"], [torch.float32])
    _base.device_of = lambda _: DEVICE
    fresh.load_state_dict(first.state_dict())
    for a, b in zip(*(sum((g["params"] for g in o.param_groups), []) for o in (first, fresh)), strict=True):
        b.data.copy_(a.data)
    trajectory([first, fresh], "after")


def orders_of_memory() -> None:
    """A gradient in another order than its parameter, whose states follow the parameter; and one with gaps."""
    shape = (6, 8, 10, 12)
    layouts = {"last": lambda t: t.contiguous(memory_format=torch.channels_last), "reversed": lambda t: t.permute(
        3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), "plain": lambda t: t.contiguous(), "gaps": lambda t: torch.stack(
        (t, t), -1)[..., 0], "expanded": lambda t: t[:1, :1].expand(shape)}
    for name, order, grad_order in itertools.product(MAKERS, ("last", "reversed", "plain"), layouts):
        for options in ({"max_grad_norm": 1.0}, {"state_dtype": "int8"}) if grad_order in ("last", "gaps") else ({},):
            torch.manual_seed(5)
            first = torch.randn(shape)
            params = [[layouts[order](first.to(where)).requires_grad_(), torch.randn(300).to(where).requires_grad_()]
                      for where in ("cpu", PLACE)]
            optimizers = [MAKERS[name](own, **options) for own in params]
            for step in range(2):
                torch.manual_seed(step)
                grads = torch.randn(shape), torch.randn(300)
                for optimizer, own, device in zip(optimizers, params, ("", DEVICE), strict=True):
                    own[0].grad = layouts[grad_order](grads[0].to(own[0].device))
                    own[1].grad = grads[1].to(own[1].device)
                    _base.device_of = lambda _, device=device: device
                    optimizer.step()
                assert close(params[0][0], params[1][0], torch.float32 if not options.get("state_dtype") else
                             torch.bfloat16), (name, order, grad_order, options, step)


def refusals() -> None:
    """What a device does not take is said before anything is changed: a parameter with gaps, and a state in another
    order.
    """
    _base.device_of = lambda _: DEVICE
    for kind, every in (("gaps", 2), ("state", 1)):
        param = torch.randn(6, 7 * every).to(PLACE)[:, ::every].requires_grad_()
        param.grad = torch.ones_like(param)
        before = param.detach().clone()
        optimizer = FusedAdam([param])
        if kind == "state":
            optimizer.state[param] = {"step": torch.zeros((), device=PLACE), "exp_avg": torch.zeros_like(param),
                                      "exp_avg_sq": torch.zeros(7, 6, device=PLACE).t()}
        try:
            optimizer.step()
        except TypeError as error:
            assert "different orders" in str(error) and "parameter 0 of group 0" in str(error), str(error)
        else:
            raise AssertionError(f"{kind}: passed")
        assert torch.equal(param, before)
    param = torch.randn(6, 7).to(PLACE).requires_grad_()
    param.grad = torch.ones(7, 6, device=PLACE).t()
    optimizer = FusedAdam([param])
    for _ in range(2):
        if PLACE == "cpu":
            LIBRARY.ont_emulate_capture_begin()
            said = refusal(optimizer.step)
            LIBRARY.ont_emulate_capture_end()
            assert "captures this stream" in said and "another order" in said, said
        optimizer.step()


CHECKS = [classes, eight_bits, eight_bit_memory, written_parameters, random_rounding, random_rounding_is_not_captured,
          step_in_backward, orders_of_memory, groups_without_elements, rates_on_the_device, scaler, saved_and_loaded,
          refusals]


def main(plugin: str, device: str, part: str = "0/1") -> None:
    global LIBRARY, PLACE, DEVICE
    _C.open_plugin(plugin or None)
    DEVICE = device
    LIBRARY = ctypes.CDLL(plugin)
    PLACE = "cuda" if device.startswith("cuda") else "cpu"
    run_checks(map(torch.no_grad(), every_nth(CHECKS, part)))


if __name__ == "__main__":
    main(*sys.argv[1:])
