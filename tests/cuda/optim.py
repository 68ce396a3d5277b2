"""The kernels of cuda/kernels/optim.cu, emulated, against torch's optimizers, clipping and unscaling. The steps of the
optimizer classes have optim_steps.py.

    python tests/cuda/optim.py PLUGIN DEVICE [part/parts]

Prints what checks.py says.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable

import test_fp16_optimizer
import torch
from checks import close, every_nth, refusal, run_checks
from torch import Tensor

import onnxtrain
from onnxtrain import _C
from onnxtrain.optim import SGD as Momentum
from onnxtrain.optim import Lamb, Lion, _base, _clip, fp16_optimizer

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
    _base.device_of = lambda _: DEVICE
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
    _base.device_of = lambda _: DEVICE
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
    """FP16_Optimizer's cases by stand-ins for Apex, with gradients on the device."""
    _base.device_of = lambda _: DEVICE
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
    finally:
        _C.grads_on = whole


def zero() -> None:
    """What DeepSpeed's ZeRO asks for: the overflow of each dtype, the norm of each gradient,
    a factor that the step reads there.
    """
    _base.device_of = lambda _: DEVICE
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


CHECKS = [clip_grad_norm, recorded, fp16_optimizers, zero, adamw, adam_l2, sgd, adagrad, lamb, lion, clip,
          unscale_and_skip, halves, maximize]


def main(plugin: str, device: str, part: str = "0/1") -> None:
    global LIBRARY, PLACE, DEVICE
    _C.open_plugin(plugin or None)
    DEVICE = device
    LIBRARY = ctypes.CDLL(plugin)
    PLACE = "cuda" if device.startswith("cuda") else "cpu"
    run_checks(map(torch.no_grad(), every_nth(CHECKS, part)))


if __name__ == "__main__":
    main(*sys.argv[1:])
