"""The multi-tensor optimizers of cuda/kernels/optim.cu, emulated, against torch's and against the CPU's.

    python tests/cuda/optim.py PLUGIN DEVICE [part/parts]

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
import test_fp16_optimizer
import torch
from checks import every_nth, refusal, run_checks
from torch import Tensor

import onnxtrain
from onnxtrain import _C
from onnxtrain.optim import SGD as Momentum
from onnxtrain.optim import Adagrad, FusedAdam, Lamb, Lion, _clip, _engine, fp16_optimizer
from onnxtrain.ortmodule import ORTModule, _module

ADAM, LAMB_RULE, SGD, ADAGRAD, LION = range(5)
NUMBER = {torch.float32: 1, torch.float64: 11, torch.float16: 10, torch.bfloat16: 16}
CHUNK = 16384
LIBRARY: ctypes.CDLL
PLACE = DEVICE = "cpu"


class Entry(ctypes.Structure):
    _fields_ = [("param", ctypes.c_void_p), ("grad", ctypes.c_void_p), ("state", ctypes.c_void_p * 3),
                ("scale", ctypes.c_void_p * 2), ("master", ctypes.c_void_p), ("step", ctypes.c_void_p),
                ("count", ctypes.c_int64), ("param_dtype", ctypes.c_int32), ("grad_dtype", ctypes.c_int32),
                ("state_dtype", ctypes.c_int32 * 3), ("fresh", ctypes.c_int32), ("stochastic", ctypes.c_int32),
                ("stream", ctypes.c_uint32), ("first_chunk", ctypes.c_int64)]


class Job(ctypes.Structure):
    _fields_ = [("tensors", ctypes.c_void_p), ("chunk_tensor", ctypes.c_void_p), ("n_tensors", ctypes.c_int64),
                ("n_chunks", ctypes.c_int64), ("rule", ctypes.c_int32), ("maximize", ctypes.c_int32),
                ("hyper", ctypes.c_double * 12), ("max_norm", ctypes.c_double),
                ("found_inf", ctypes.c_void_p), ("inv_scale", ctypes.c_void_p), ("norm", ctypes.c_void_p),
                ("work", ctypes.c_void_p), ("factor", ctypes.c_void_p), ("lr", ctypes.c_void_p),
                ("wide_out", ctypes.c_void_p), ("seed", ctypes.c_uint64), ("grad", ctypes.c_void_p),
                ("absent", ctypes.c_int32)]


class Engine:
    """Parameters with their states, and the launches on them."""

    def __init__(self, rule: int, hyper: list[float], params: list[Tensor], states: int, master: bool = False) -> None:
        self.rule, self.hyper, self.params = rule, hyper, params
        kept = torch.float64 if params[0].dtype == torch.float64 else torch.float32
        self.states = [[torch.zeros(p.shape, dtype=kept, device=PLACE) for _ in range(states)] for p in params]
        self.masters = [p.float().clone() if master else None for p in params]
        self.steps = [torch.zeros((), device=PLACE) for _ in params]
        self.found_inf, self.inv_scale, self.norm = (torch.full((), v, device=PLACE) for v in (0.0, 1.0, 0.0))
        self.taken = 0

    def job(self, grads: list[Tensor], max_norm: float = -1.0, maximize: bool = False) -> Job:
        entries, chunks = (Entry * len(grads))(), []
        for k, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            pointers = [s.data_ptr() for s in self.states[k]] + [None] * (3 - len(self.states[k]))
            master = self.masters[k]
            dtypes = (ctypes.c_int32 * 3)(*[NUMBER[s.dtype] for s in self.states[k]])
            entries[k] = Entry(param.data_ptr(), grad.data_ptr(), (ctypes.c_void_p * 3)(*pointers),
                               (ctypes.c_void_p * 2)(), None if master is None else master.data_ptr(),
                               self.steps[k].data_ptr(), param.numel(), NUMBER[param.dtype], NUMBER[grad.dtype],
                               dtypes, self.taken == 0, 0, 0, len(chunks))
            chunks += [k] * -(-param.numel() // CHUNK)
        table = torch.tensor(chunks or [0], dtype=torch.int32, device=PLACE)
        rows = torch.frombuffer(bytearray(entries), dtype=torch.uint8).to(PLACE)
        work = torch.full((2 * len(chunks) + len(grads) + 2,), float("nan"), dtype=torch.float64, device=PLACE)
        self.alive = (rows, table, work, grads)
        hyper = (ctypes.c_double * 12)(*self.hyper)
        return Job(rows.data_ptr(), table.data_ptr(), len(grads), len(chunks), self.rule, maximize, hyper, max_norm,
                   self.found_inf.data_ptr(), self.inv_scale.data_ptr(), self.norm.data_ptr(), work.data_ptr())

    def step(self, grads: list[Tensor], **options: float) -> None:
        assert LIBRARY.ont_launch_optim_step(ctypes.byref(self.job(grads, **options)), None) == 0
        self.taken += 1


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(shape).to(PLACE, dtype) for shape in ((5, 7), (CHUNK + 33,), (1,), (0,), (64,))]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(100 + step)
    return [torch.randn(p.shape).to(PLACE, dtype) for p in tensors()]


def against(make: Callable[[list[Tensor]], torch.optim.Optimizer], rule: int, hyper: list[float], states: int,
            tol: float = 2e-6, clip: float = -1.0, dtype: torch.dtype = torch.float32) -> None:
    ours, theirs = tensors(dtype), [p.requires_grad_() for p in tensors(dtype)]
    engine, optimizer = Engine(rule, hyper, ours, states), make(theirs)
    for step in range(4):
        grads = gradients(step, dtype)
        for p, g in zip(theirs, grads):
            p.grad = g.clone()
        if clip >= 0:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        engine.step(grads, max_norm=clip)
        optimizer.step()
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b.detach(), rtol=tol, atol=tol), (a - b).abs().max()
    assert all(s.item() == 4 for s in engine.steps)


def adamw() -> None:
    for amsgrad in (False, True):
        hyper = [1e-2, 0.9, 0.99, 1e-8, 0.1, 2, 1, amsgrad]
        against(lambda p: torch.optim.AdamW(p, 1e-2, (0.9, 0.99), 1e-8, 0.1, amsgrad=amsgrad), ADAM, hyper,
                3 if amsgrad else 2)
    against(lambda p: torch.optim.AdamW(p, 1e-2, (0.9, 0.99), 1e-8, 0.1), ADAM, [1e-2, 0.9, 0.99, 1e-8, 0.1, 2, 1, 0],
            2, 1e-12, dtype=torch.float64)


def adam_l2() -> None:
    against(lambda p: torch.optim.Adam(p, 1e-2, (0.9, 0.99), 1e-8, 0.1), ADAM, [1e-2, 0.9, 0.99, 1e-8, 0.1, 3, 1, 0], 2)


def sgd() -> None:
    for momentum, dampening, nesterov in ((0, 0, False), (0.9, 0.1, False), (0.9, 0, True)):
        against(lambda p: torch.optim.SGD(p, 0.1, momentum, dampening, 0.01, nesterov), SGD,
                [0.1, momentum, dampening, 0.01, nesterov], 1)


def adagrad() -> None:
    against(lambda p: torch.optim.Adagrad(p, 0.1, 0.01, 0.02, eps=1e-9), ADAGRAD, [0.1, 0.01, 1e-9, 0.02], 1)


def lamb() -> None:
    against(lambda p: Lamb(p, 1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01), LAMB_RULE, lamb_hyper(), 2, 1e-5)


def lamb_hyper() -> list[float]:
    made = Lamb([torch.zeros(1)], 1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01)
    return [float(v) for v in made._hyper(made.param_groups[0])]


def lion() -> None:
    made = Lion([torch.zeros(1)], 1e-2)
    against(lambda p: Lion(p, 1e-2), LION, [float(v) for v in made._hyper(made.param_groups[0])], 1)


def clip() -> None:
    against(lambda p: torch.optim.SGD(p, 0.1), SGD, [0.1, 0, 0, 0, 0], 1, clip=3.0)
    grads, engine = gradients(0), Engine(SGD, [0.1, 0, 0, 0, 0], tensors(), 1)
    want = [g.clone().requires_grad_() for g in grads]
    for w in want:
        w.grad = w.detach().clone()
    norm = torch.nn.utils.clip_grad_norm_(want, 5.0)
    assert LIBRARY.ont_launch_optim_clip(ctypes.byref(engine.job(grads, max_norm=5.0)), None) == 0
    assert torch.allclose(engine.norm, norm, rtol=1e-6)
    for g, w in zip(grads, want):
        assert torch.allclose(g, w.grad, rtol=1e-6, atol=1e-9)


def unscale_and_skip() -> None:
    """As GradScaler: gradients are divided by the scale, an infinity stops the step, states and counts included."""
    for bad in (False, True):
        for dtype in (torch.float32, torch.float16):
            engine, grads = Engine(ADAM, [1e-2, 0.9, 0.99, 1e-8, 0, 2, 1, 0], tensors(), 2), gradients(0, dtype)
            before, raw = [p.clone() for p in engine.params], [g.clone() for g in grads]
            engine.inv_scale.fill_(1 / 8)
            if bad:
                grads[1][7] = float("inf")
            job = engine.job(grads)
            assert LIBRARY.ont_launch_optim_unscale(ctypes.byref(job), ctypes.c_void_p(engine.found_inf.data_ptr()),
                                                    None) == 0
            assert engine.found_inf.item() == bad
            assert torch.allclose(grads[0].float(), raw[0].float() / 8, rtol=1e-3, atol=1e-6)
            engine.inv_scale.fill_(1)
            engine.step(grads)
            moved = [not torch.equal(p, b) for p, b in zip(engine.params, before) if p.numel()]
            assert all(moved) != bad and any(moved) != bad
            assert all(s.item() == (0 if bad else 1) for s in engine.steps)


def with_gradients(kinds: list[torch.dtype], scale: float = 1.0) -> list[Tensor]:
    params = []
    for kind in kinds:
        for shape in ((5, 7), (CHUNK + 33,), (1,), (0,), (2, 3, 4, 5)):
            p = torch.randn(shape).to(PLACE, kind).requires_grad_()
            p.grad = (torch.randn(shape) * scale).to(PLACE, kind)
            params.append(p)
    params[-1].grad = params[-1].grad.contiguous(memory_format=torch.channels_last)
    return params


def clip_grad_norm() -> None:
    """clip_grad_norm_() outside of a step, against torch's on the same numbers, every dtype,
    where and where not it clips.
    """
    _engine.device_of = lambda _: DEVICE
    used = []
    whole = _clip._lists._call
    _clip._lists._call = lambda place, what, *a, **o: (used.append(what), whole(place, what, *a, **o))
    try:
        for kinds in ([torch.float32], [torch.bfloat16], [torch.float32, torch.float64, torch.float16]):
            for limit in (0.5, 1e9, 0.0):
                torch.manual_seed(4)
                ours = with_gradients(kinds)
                wide = [p.grad.double().requires_grad_() for p in ours]
                for w in wide:
                    w.grad = w.detach().clone()
                want = torch.nn.utils.clip_grad_norm_(wide, limit)
                got = onnxtrain.optim.clip_grad_norm_(ours, limit)
                assert (torch.allclose(got.double(), want, rtol=1e-6)
                        and got.dtype == (torch.float64 if torch.float64 in kinds else torch.float32))
                for p, w in zip(ours, wide, strict=True):
                    assert close(p.grad, w.grad, p.dtype), (kinds, limit, p.dtype, p.shape)
        assert used == ["clip"] * 9, used
        for bad in (float("inf"), float("nan")):
            ours, theirs = with_gradients([torch.float32]), with_gradients([torch.float32])
            for a, b in zip(ours, theirs, strict=True):
                b.grad = a.grad.clone()
            ours[1].grad[5] = theirs[1].grad[5] = bad
            try:
                onnxtrain.optim.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
            except RuntimeError as error:
                assert "non-finite" in str(error)
            else:
                raise AssertionError("a norm that is not finite passed")
            assert all(torch.equal(a.grad, b.grad) or i == 1 for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))
            onnxtrain.optim.clip_grad_norm_(ours, 1.0)
            torch.nn.utils.clip_grad_norm_(theirs, 1.0)
            for a, b in zip(ours, theirs, strict=True):
                assert torch.allclose(a.grad, b.grad, equal_nan=True)
        ours = with_gradients([torch.float32])
        ours[0].grad = torch.randn(7, 5).to(PLACE).t()  # strided: torch's function
        used.clear()
        onnxtrain.optim.clip_grad_norm_(ours, 1.0)
        onnxtrain.optim.clip_grad_norm_(with_gradients([torch.float32]), 1.0, norm_type=1.0)
        assert not used
    finally:
        del _clip._lists._call


def recorded() -> None:
    """On a stream that somebody records: the tensors of the call before, or a refusal;
    what was recorded stays valid.
    """
    _engine.device_of = lambda _: DEVICE
    params = with_gradients([torch.float32])
    grads = [p.grad for p in params]
    onnxtrain.optim.clip_grad_norm_(params, 1.0)
    clip, other = (lambda: onnxtrain.optim.clip_grad_norm_(params, 1.0)), with_gradients([torch.float32] * 3)
    if PLACE == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            norm = clip()
            refused = refusal(lambda: onnxtrain.optim.clip_grad_norm_(other, 1.0))
        replay = graph.replay
    else:
        norm = torch.zeros((), dtype=torch.float64)
        LIBRARY.ont_emulate_capture_begin()
        _clip._lists._call(DEVICE, "clip", grads, out=norm, max_norm=1.0)
        refused = refusal(lambda: onnxtrain.optim.clip_grad_norm_(other, 1.0))
        LIBRARY.ont_emulate_capture_end.restype = ctypes.c_void_p
        graph = ctypes.c_void_p(LIBRARY.ont_emulate_capture_end())

        def replay() -> None:
            assert LIBRARY.ont_emulate_graph_launch(graph) == 0
    assert "captures this stream" in refused and "first" in refused, refused
    onnxtrain.optim.clip_grad_norm_(other, 1.0)  # takes new tables: the recorded ones stay
    for step in range(3):
        torch.manual_seed(step)
        for g in grads:
            g.copy_(torch.randn(g.shape))
        want = torch.cat([g.flatten() for g in grads]).double().norm()
        replay()
        assert torch.allclose(norm.double(), want, rtol=1e-6), step
        assert torch.allclose(torch.cat([g.flatten() for g in grads]).norm().double(), torch.ones_like(want), rtol=1e-4)


def fp16_optimizers() -> None:
    """FP16_Optimizer's cases by stand-ins for Apex and Megatron, with gradients on the device."""
    _engine.device_of = lambda _: DEVICE
    used = []
    whole = _C.grads_on
    _C.grads_on = lambda tables, place, what, *rest: (used.append(what), whole(tables, place, what, *rest))
    try:
        with torch.device(PLACE), torch.enable_grad():
            test_fp16_optimizer.test_apex()
            for bad in (float("inf"), float("-inf"), float("nan")):
                for dynamic in (True, False):
                    test_fp16_optimizer.test_apex_overflow(bad, dynamic)
            assert set(used) == {"scale"}, used
            test_fp16_optimizer.test_megatron()
            assert set(used) == {"scale", "sums"}, used
    finally:
        _C.grads_on = whole


def zero() -> None:
    """What DeepSpeed's ZeRO asks for: the overflow of each dtype, the norm of each gradient,
    a factor that the step reads there.
    """
    _engine.device_of = lambda _: DEVICE
    lists, grads = fp16_optimizer._Lists(), [p.grad
                                             for p in with_gradients([torch.float16, torch.float32, torch.float64])]
    place = lists.place(grads)
    assert place == DEVICE
    sums = lists.sums(place, grads)
    for g, s in zip(grads, sums.tolist(), strict=True):
        assert math.isclose(s, g.double().square().sum().item(), rel_tol=1e-9)
    assert bool(lists.finite(place, grads, sums))
    grads[-4][3] = 1e200  # float64: its square is no number, itself is one
    assert bool(lists.finite(place, grads, lists.sums(place, grads)))
    grads[1][CHUNK + 5] = float("inf")
    assert not bool(lists.finite(place, grads, lists.sums(place, grads)))
    measured = fp16_optimizer._Sums(lists)
    first = measured.measure(place, grads[:3])
    assert torch.equal(measured.take(place, grads[:3]), first) and not measured.known
    measured.measure(place, grads[:3])
    assert torch.equal(measured.take(place, grads[2:0:-1]), first[[2, 1]])
    ours, theirs = (torch.full((40,), 2.0, device=PLACE, requires_grad=True) for _ in range(2))
    for p, factor in ((ours, torch.full((1,), 0.25, device=PLACE)), (theirs, 0.25)):
        optimizer = Momentum([p], lr=1.0)
        p.grad = torch.full_like(p, 4.0)
        optimizer.next_unscale = factor
        optimizer.step()
        assert optimizer.next_unscale == 1.0
    assert torch.equal(ours, theirs) and float(ours.detach()[0]) == 1.0


def halves() -> None:
    """16-bit parameters with float32 copies follow the float32 ones; without copies they round."""
    for dtype in (torch.float16, torch.bfloat16):
        hyper = [1e-3, 0.9, 0.99, 1e-8, 0.1, 2, 1, 0]
        narrow = tensors(dtype)
        wide = [p.float() for p in narrow]
        kept, exact = Engine(ADAM, hyper, narrow, 2, master=True), Engine(ADAM, hyper, wide, 2)
        for step in range(3):
            grads = gradients(step, dtype)
            kept.step(grads)
            exact.step([g.float() for g in grads])
        for n, w, m in zip(narrow, wide, kept.masters):
            assert torch.equal(n, w.to(dtype)) and torch.equal(m, w)


def maximize() -> None:
    ours, theirs = tensors(), tensors()
    Engine(SGD, [0.1, 0, 0, 0, 0], ours, 1).step(gradients(0), maximize=True)
    for a, b, g in zip(ours, theirs, gradients(0)):
        assert torch.allclose(a, b + 0.1 * g, rtol=1e-6, atol=1e-7)


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


def close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    tol = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    return torch.allclose(a.double().cpu(), b.double().cpu(), rtol=tol, atol=tol, equal_nan=True)


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
            _engine.device_of = lambda _, device=device: device
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
            _engine.device_of = lambda _, device=device: device
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
    _engine.device_of = lambda _: DEVICE
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
    _engine.device_of = lambda _: DEVICE
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
    _engine.device_of = lambda _: DEVICE
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


@torch.enable_grad()
def step_in_backward() -> None:
    """Every bit as backward and then step() have it, on the device; which updates one parameter after the other, while
    backward runs.
    """
    _engine.device_of = lambda _: DEVICE
    before, _module.device_of = _module.device_of, lambda tensors: DEVICE
    try:
        for kind, names in ((torch.float32, IN_BACKWARD), (torch.bfloat16, ("random", "random adam", "master"))):
            torch.manual_seed(0)
            module = in_backward.Net().to(PLACE, kind)
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
                            assert len(optimizer._in_backward.updated) == 11, (name, step)
                        optimizer.step()
                        optimizer.zero_grad()
                    in_backward.same(*models, pairs[0][1], pairs[1][1])
                bond.remove()
            for model in models:
                counts = onnxtrain.stats(model)
                assert counts["fallback_steps"] == 0, counts["reasons"]
    finally:
        _module.device_of = before


def rates_on_the_device() -> None:
    """A rate that is a tensor on the device is read there."""
    pair_of = pair(MAKERS["adam"], [torch.float32])
    for group in pair_of[1].param_groups:
        group["lr"] = torch.tensor(group["lr"], device=PLACE)
    number = _engine.number
    _engine.number = lambda value: 1e9 if isinstance(value, Tensor) else value  # nobody may ask for it
    try:
        trajectory(pair_of, "rate")
    finally:
        _engine.number = number


def scaler() -> None:
    """GradScaler's numbers: gradients are divided on the device, an infinity skips the step and its count there."""
    for name, bad in itertools.product(("adam", "sgd", "lamb"), (False, True)):
        optimizers = pair(MAKERS[name], [torch.float32, torch.float16], max_grad_norm=1.0)
        trajectory(optimizers, name)
        for optimizer, device in zip(optimizers, ("", DEVICE), strict=True):
            _engine.device_of = lambda _, device=device: device
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
    _engine.device_of = lambda _: DEVICE
    fresh.load_state_dict(first.state_dict())
    for a, b in zip(*(sum((g["params"] for g in o.param_groups), []) for o in (first, fresh)), strict=True):
        b.data.copy_(a.data)
    trajectory([first, fresh], "after")


def refusals() -> None:
    """What a device does not take is said before anything is changed."""
    param = torch.randn(6, 7).to(PLACE).requires_grad_()
    param.grad = torch.ones(7, 6, device=PLACE).t()
    before = param.detach().clone()
    _engine.device_of = lambda _: DEVICE
    try:
        FusedAdam([param]).step()
    except TypeError as error:
        assert "different orders" in str(error) and "parameter 0 of group 0" in str(error), str(error)
    else:
        raise AssertionError("different orders: passed")
    assert torch.equal(param, before)


CHECKS = [clip_grad_norm, recorded, fp16_optimizers, zero, classes, eight_bits, eight_bit_memory, written_parameters,
          random_rounding, random_rounding_is_not_captured, step_in_backward, rates_on_the_device, scaler,
          saved_and_loaded, refusals, adamw, adam_l2, sgd, adagrad, lamb, lion, clip, unscale_and_skip, halves,
          maximize]


def main(plugin: str, device: str, part: str = "0/1") -> None:
    global LIBRARY, PLACE, DEVICE
    _C.open_plugin(plugin or None)
    DEVICE = device
    LIBRARY = ctypes.CDLL(plugin)
    PLACE = "cuda" if device.startswith("cuda") else "cpu"
    run_checks(map(torch.no_grad(), every_nth(CHECKS, part)))


if __name__ == "__main__":
    main(*sys.argv[1:])
