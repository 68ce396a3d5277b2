"""Memory of programs on a device: tensors that the caller gets, streams that must wait, static buffers of graphs.

    python tests/cuda/device_memory.py PLUGIN DEVICE [part/parts]

Prints what checks.py says. What needs memory that runs out, or a look at the device's streams, runs on the emulated
device alone.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable

import onnx
import torch
from checks import every_nth, run_checks

from onnxtrain import _C
from onnxtrain.optim import SGD, _base, _clip
from onnxtrain.ortmodule import ORTModule, _runner

DEVICE = PLACE = "cpu"
LIBRARY: ctypes.CDLL
TYPES = {"float": torch.float32, "double": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16,
         "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}


def is_emulated() -> bool:
    return not DEVICE.startswith("cuda")


def session(text: str, programs: int = 16) -> _C.Session:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    return _C.Session(model.SerializeToString(), programs, DEVICE)


def is_torchs(tensor: torch.Tensor) -> bool:
    """Whether torch's allocator owns the memory. Memory that is wrapped cannot be resized, and record_stream() does
    nothing for it.
    """
    return tensor.untyped_storage().resizable()


def steps_of(model: _C.Session, tensors: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, tuple]:
    outputs, run = model.forward(tensors, bytes([1] * len(tensors)), 3)
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    grads = run.backward(saved, [grad])
    return outputs[0], grads


def outputs_and_gradients() -> None:
    """Of a session, eager and replayed, are tensors of torch's own, whose values are right."""
    model = session("g (float[4, 6] x, float[6, 5] w) => (float[4, 5] y) { a = MatMul(x, w)  y = Tanh(a) }")
    torch.manual_seed(0)
    for _ in range(6):
        x, w = torch.randn(4, 6, device=PLACE), torch.randn(6, 5, device=PLACE)
        y, (dx, dw) = steps_of(model, [x, w], torch.ones(4, 5, device=PLACE))
        assert all(is_torchs(t) for t in (y, dx, dw))
        assert y.shape == (4, 5) and dx.shape == (4, 6) and dw.shape == (6, 5) and y._version == 0
        want = torch.tanh(x @ w)
        assert torch.allclose(y, want, atol=1e-5) and torch.allclose(dx, (1 - want**2) @ w.t(), atol=1e-4)
        assert model.stats()["pool_live_bytes"] == 0, "a block outlives its step"


def every_dtype() -> None:
    """Also scalars and tensors without elements."""
    for name, dtype in TYPES.items():
        for shape in ((3, 5), (), (0, 4)):
            x = torch.ones(shape, device=PLACE).to(dtype)
            kind = f"{name}[{', '.join(map(str, shape))}]"
            (y,), _ = session(f"g ({kind} x) => ({kind} y) {{ y = Identity(x) }}").forward([x], b"\0")
            assert y.dtype == dtype and y.shape == x.shape and torch.equal(y, x), kind
            assert is_torchs(y) and (not y.numel() or y.data_ptr() != x.data_ptr()), kind


def module() -> None:
    """What a module returns, and the gradients that it leaves, are torch's own; an output that is dropped before its
    backward is freed.
    """
    before, _runner.device_of = _runner.device_of, lambda tensors: DEVICE
    try:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(PLACE)
        model = ORTModule(layers)
        x = torch.randn(4, 6, device=PLACE, requires_grad=True)
        for _ in range(5):
            y = model(x)
            assert is_torchs(y) and y.requires_grad
            y.square().sum().backward()
            assert all(is_torchs(t.grad) for t in (x, *layers.parameters()))
            x.grad = None
            layers.zero_grad()
        y = torch.tanh(model(x))
        node = weakref.ref(y.grad_fn.next_functions[0][0])
        del y
        gc.collect()
        assert node() is None, "an output keeps its own run alive"
    finally:
        _runner.device_of = before


def streams() -> None:
    """A program's memory that another stream used last goes back only after the stream that it was allocated on has
    been told to wait.
    """
    if not is_emulated():
        return
    x = torch.randn(40, 30)
    try:
        for other, more in ((1, 0), (2, 2)):  # slab and constants
            LIBRARY.ont_emulate_set_stream(ctypes.c_void_p(1))
            model = session("g (float[40, 30] x) => (float[40, 30] y) <float[3] c = {1.0, 2.0, 3.0}> "
                            "{ a = Softmax(x)  s, t = Split <num_outputs = 2> (c)  e = Mul(a, t)  y = Softmax(e) }")
            model.forward([x], b"\0")
            LIBRARY.ont_emulate_set_stream(ctypes.c_void_p(other))
            model.forward([x], b"\0")
            LIBRARY.ont_emulate_set_stream(ctypes.c_void_p(3))
            before = joins()[0]
            del model
            gc.collect()
            assert joins()[0] == before + more, (joins(), before, more)
        assert joins()[1:] == (1, 2), joins()
    finally:
        LIBRARY.ont_emulate_set_stream(None)


def joins() -> tuple[int, int | None, int | None]:
    """How often a stream has waited for another one; which did last, and for which."""
    waiting, awaited = ctypes.c_void_p(), ctypes.c_void_p()
    return LIBRARY.ont_emulate_joins(ctypes.byref(waiting), ctypes.byref(awaited)), waiting.value, awaited.value


def tables() -> None:
    """Tables that an optimizer's step or a clipping used on another stream are used again, or freed, only after that
    stream's work.
    """
    if not is_emulated():
        return

    def on_stream(stream: int, call: Callable[[], object]) -> int:
        """How often a stream waits for another one meanwhile."""
        LIBRARY.ont_emulate_set_stream(ctypes.c_void_p(stream))
        before = joins()[0]
        call()
        gc.collect()
        return joins()[0] - before

    def sgd() -> SGD:
        few[0].grad = torch.ones_like(few[0])
        return SGD(few, lr=0.1)

    def clip(tensors: list[torch.Tensor]) -> None:
        lists.clip(DEVICE, tensors, 1.0)

    few, many, lists = [torch.randn(40, requires_grad=True)], [torch.randn(40) for _ in range(9)], _clip.Lists()
    before, _base.device_of = _base.device_of, lambda _: DEVICE
    held = [sgd()]
    try:
        for use, free, more in ((lambda: held[0].step(), held.clear, 1),
                                (lambda: clip(many[:1]), lambda: clip(many), 2)):  # the table is too short for all
            assert on_stream(1, use) == 0
            assert on_stream(2, use) == 1 and joins()[1:] == (2, 1)
            assert on_stream(2, use) == 0
            assert on_stream(3, free) == more and joins()[1:] == (1, 2)
    finally:
        LIBRARY.ont_emulate_set_stream(None)
        _base.device_of = before


PRODUCT = """g (float[16, 20] x, float[20, 30] w, float[30] b) => (float[16, 30] y)
    { a = MatMul(x, w)  c = Add(a, b)  y = Tanh(c) }"""


class Moving:
    """A session whose three inputs each have two addresses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = session(PRODUCT)
        self.places = [[t, t.clone()] for t in (torch.randn(16, 20, device=PLACE), torch.randn(20, 30, device=PLACE),
                                                torch.randn(30, device=PLACE))]

    def call(self, chosen: list[int]) -> str:
        """Runs forward with these addresses, checks the result; why the call was not a replay."""
        tensors = [places[k] for places, k in zip(self.places, chosen, strict=True)]
        tensors[0].normal_()
        (y,), _ = self.model.forward(tensors, b"\0\0\0")
        assert torch.allclose(y, torch.tanh(tensors[0] @ tensors[1] + tensors[2]), atol=1e-5)
        self.outputs = y  # keeps its address from being used again at once
        return next(reason for phase, _, _, reason in self.model.graphs() if phase == "forward")


def no_room() -> None:
    """Where a tensor has moved and there is no memory for its static buffer, the phase runs eagerly, and says so."""
    if not is_emulated():
        return
    both = Moving()
    for _ in range(5):
        both.call([0, 0, 0])
    LIBRARY.ont_emulate_set_largest(ctypes.c_size_t(16 * 30 * 4))
    try:
        assert both.call([0, 1, 0]) == "no room for a static buffer"
        LIBRARY.ont_emulate_set_largest(ctypes.c_size_t(2**62))
        assert both.call([0, 1, 0]) == "no room for a static buffer"
        assert both.call([1, 0, 1]) == "no room for a static buffer"
    finally:
        LIBRARY.ont_emulate_set_largest(ctypes.c_size_t(2**62))


def settles() -> None:
    """Tensors that begin to move one after the other, every second call: each costs one call that is not replayed."""
    both = Moving()
    for _ in range(6):
        both.call([0, 0, 0])
    for moving in range(3):
        chosen = [int(k == moving) for k in range(3)]
        assert both.call(chosen) == "a tensor has moved", moving
        assert both.call(chosen) == "", f"the call after tensor {moving} has moved is not replayed"
    for k in range(6):
        assert both.call([k % 2, (k + 1) % 2, k % 2]) == "", k


def shared_blocks() -> None:
    """Programs come and go without allocations of memory that host and device see, which would wait for the device."""
    if not is_emulated():
        return
    x = torch.randn(3, 4)

    def come_and_go(n: int) -> int:
        for _ in range(n):
            session("g (float[3, 4] x) => (float[3, 4] y) { y = Exp(x) }").forward([x], b"\0")
        gc.collect()
        return LIBRARY.ont_emulate_shared_pages()

    before = come_and_go(2)
    assert come_and_go(300) <= before + 1


def large_heads() -> None:
    """On a GPU with little shared memory, attention whose gradient does not fit is not fused in forward either."""
    if not is_emulated():
        return
    text = """g (float[2, 2, 24, 200] q, float[2, 2, 24, 200] k, float[2, 2, 24, 200] v) => (float[2, 2, 24, 200] o)
        { w = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul(q, w)  r = Softmax(s)  o = MatMul(r, v) }"""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, 24, 200) / 4 for _ in range(3)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    want = torch.softmax(leaves[0] @ leaves[1].transpose(2, 3), -1) @ leaves[2]
    want.backward(torch.ones_like(want))
    for kilobytes, fused in ((227, True), (99, False)):
        LIBRARY.ont_emulate_set_shared_limit(ctypes.c_size_t(kilobytes << 10))
        try:
            model = session(text)
            y, grads = steps_of(model, tensors, torch.ones_like(want))
        finally:
            LIBRARY.ont_emulate_set_shared_limit(ctypes.c_size_t(227 << 10))
        assert ("FusedAttention" in model.text("program")) == fused, kilobytes
        assert torch.allclose(y, want, atol=1e-4)
        for got, leaf in zip(grads, leaves, strict=True):
            assert torch.allclose(got, leaf.grad, atol=1e-4)


CHECKS: list[Callable[[], None]] = [outputs_and_gradients, every_dtype, module, streams, tables, no_room, settles,
                                    shared_blocks, large_heads]


def main(plugin: str, device: str, part: str = "0/1") -> None:
    global DEVICE, PLACE, LIBRARY
    _C.open_plugin(plugin or None)
    DEVICE = device
    if is_emulated():
        LIBRARY = ctypes.CDLL(plugin)
    else:
        PLACE = device
    _C.set_timing(False)  # steps that are timed are not replayed
    run_checks(every_nth(CHECKS, part))


if __name__ == "__main__":
    main(*sys.argv[1:])
