"""Dropout by the numbers of torch's CUDA kernel, against that kernel written down again in NumPy; on a GPU against
torch itself.

    python tests/cuda/dropout.py PLUGIN DEVICE [part/parts]

Prints what checks.py says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from checks import every_nth, run_checks

from onnxtrain import _C

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cpu"
BLOCKS = 3  # of the emulated device
NAMES = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "double"}


class Generator:
    """Stands in for torch's generator on the emulated device."""

    def __init__(self, seed: int, offset: int) -> None:
        self._seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def generator(seed: int, offset: int) -> Generator | torch.Generator:
    if not on_gpu():
        return Generator(seed, offset)
    made = torch.Generator(DEVICE).manual_seed(seed)
    made.set_offset(offset)
    return made


def on_gpu() -> bool:
    return DEVICE.startswith("cuda")


# ---- torch's kernel ----


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011;
    words as uint64 arrays.
    """
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    k = [key[0], key[1]]
    for _ in range(10):
        left, right = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(right >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]), right & low,
             (left >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]), left & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def known_answers() -> None:
    """Of the Random123 distribution."""
    for counter, key, want in (
            ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], (0xA4093822, 0x299F31D0),
             "d16cfe09 94fdcceb 5001e420 24126ea1")):
        got = " ".join(f"{int(word):08x}" for word in philox(counter, key))
        assert got == want, (got, want)


class Threads:
    """curand's state of each thread: Philox4_32_10 at (seed, subsequence = thread, offset)."""

    def __init__(self, n: int, seed: int, offset: int) -> None:
        self.subsequence, self.seed, self.block = np.arange(n, dtype=np.uint64), seed, offset // 4

    def uniform4(self) -> np.ndarray:
        """(4, threads) of float32 in (0, 1]."""
        zero = np.zeros_like(self.subsequence)
        words = philox([zero + np.uint64(self.block & 0xFFFFFFFF), zero + np.uint64(self.block >> 32),
                        self.subsequence, zero],
                       (self.seed & 0xFFFFFFFF, self.seed >> 32))
        self.block += 1
        return np.stack([word.astype(np.uint32).astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
                         for word in words])


def eager(n: int, dtype: torch.dtype, p: float, seed: int, offset: int, blocks: int) -> tuple[np.ndarray, int]:
    """Which of n elements torch.native_dropout keeps, and the generator's offset behind it:
    a loop as its threads run it.
    """
    grid = min(blocks, (n + 255) // 256)
    threads = grid * 256
    state = Threads(threads, seed, offset)
    keep = np.float64(1 - p) if dtype == torch.float64 else np.float32(1 - p)
    vector = 16 // dtype.itemsize
    while n % vector:
        vector //= 2
    chosen = np.zeros(n, dtype=bool)
    if vector == 1:
        for start in range(0, n, threads * 4):
            kept = state.uniform4() < keep
            for k in range(4):
                at = start + k * threads + np.arange(threads)
                chosen[at[at < n]] = kept[k][at < n]
    else:
        for start in range(0, n, threads * vector):
            kept = np.concatenate([state.uniform4() < keep for _ in range(max(1, vector // 4))])[:vector]
            for k in range(vector):
                at = start + np.arange(threads) * vector + k
                chosen[at[at < n]] = kept[k][at < n]
    return chosen, offset + ((n - 1) // (256 * grid * 4) + 1) * 4


# ---- checks ----


def session(text: str) -> _C.Session:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    return _C.Session(model.SerializeToString(), device=DEVICE, torch_random=True)


def dropout(dtype: torch.dtype, shape: list[int], p: float) -> str:
    dims = ", ".join(map(str, shape))
    return f"g ({NAMES[dtype]}[{dims}] x) => ({NAMES[dtype]}[{dims}] y) <float p = {{{p}}}, bool t = {{1}}> {{ y = Dropout(x, p, t) }}"


def place(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE) if on_gpu() else x


def backward(run: _C.Run, tensors: list, outputs: tuple, grads: list) -> tuple:
    return run.backward([tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs], grads)


def wanted(x: torch.Tensor, p: float, seed: int, offset: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What eager gives for x and for a gradient of ones, and its generator's offset afterwards."""
    if on_gpu():
        torch.cuda.manual_seed(seed)
        torch.cuda.default_generators[x.device.index].set_offset(offset)
        leaf = x.clone().requires_grad_()
        y = torch.nn.functional.dropout(leaf, p)
        y.backward(torch.ones_like(y))
        return y.detach(), leaf.grad, torch.cuda.default_generators[x.device.index].get_offset()
    chosen, after = eager(x.numel(), x.dtype, p, seed, offset, BLOCKS)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    kept = torch.from_numpy(chosen).reshape(x.shape)
    keep = torch.tensor(1 - p, dtype=wide)
    forward = (1 / keep.double()).to(wide)
    return torch.where(kept, x.to(wide) * forward, 0).to(x.dtype), kept.to(wide).mul(1 / (1 - p)).to(x.dtype), after


def same_numbers() -> None:
    """Every vector width, tails, more rounds than one, ratios that float32 cannot hold."""
    shapes = {torch.float32: [[4], [3, 5], [2, 3, 7], [1024], [61, 100], [5001]],
              torch.float16: [[8, 600], [12, 3], [4, 2001], [7, 7]],
              torch.bfloat16: [[16, 512], [50, 9], [3, 4099]], torch.float64: [[6, 700], [33, 31]]}
    for case, (dtype, shape) in enumerate((d, s) for d, all_of in shapes.items() for s in all_of):
        p = (0.1, 0.3, 0.5, 0.9)[case % 4]
        seed, offset = 2**40 * case + 12345, 4 * (case * 7 + (2**33 if case == 3 else 0))
        torch.manual_seed(case)
        x = place(torch.randn(shape).to(dtype))
        y, dx, after = wanted(x, p, seed, offset)
        given = generator(seed, offset)
        outputs, run = session(dropout(dtype, shape, p)).forward([x], b"\x01", given)
        (got,) = backward(run, [x], outputs, [torch.ones_like(x)])
        what = f"{dtype} {shape} {p}"
        assert torch.equal(outputs[0], y), f"{what}: {int((outputs[0] != y).sum())} of {y.numel()} elements differ"
        assert torch.equal(got, dx), f"{what}: the gradient differs"
        assert given.get_offset() == after, f"{what}: offset {given.get_offset()}, expected {after}"
        assert 0.3 * p < float((y == 0).float().mean()) < 3 * p or y.numel() < 500, what


CHAIN = """g (float[64, 40] x, float[40] b) => (float[64, 40] y, float[64, 40] z) <float p = {0.2}, float q = {0.5}, bool t = {1}> {
    a = Dropout(x, p, t)  c = Add(a, b)  y = Tanh(c)  d = Dropout(y, q, t)  z = Mul(d, x) }"""


def in_order() -> None:
    """Two nodes of one program, in groups with their neighbours: the second begins where the first has ended;
    step after step.
    """
    made = session(CHAIN)
    torch.manual_seed(0)
    x, b = place(torch.randn(64, 40)), place(torch.randn(40))
    given = generator(99, 8)
    at = 8
    for step in range(6):  # from the third on as a graph, which reads seed and offset from the device's memory
        a, _, at = wanted(x, 0.2, 99, at)
        y = torch.tanh(a + b)
        d, _, at = wanted(y, 0.5, 99, at)
        outputs, run = made.forward([x, b], b"\x01\x01", given)
        backward(run, [x, b], outputs, [torch.ones_like(x)] * 2)
        assert torch.allclose(outputs[0], y, rtol=1e-5, atol=1e-6), step
        assert torch.allclose(outputs[1], d * x, rtol=1e-5, atol=1e-5), step
        assert given.get_offset() == at, step
    assert made.graphs()[0][1] and made.graphs()[0][2] > 1, made.graphs()


def compiled() -> None:
    """The same by generated kernels, of which layers that differ in their place alone share one."""
    if on_gpu():
        return
    folder = ROOT / "cuda"
    log = Path(f"/tmp/ont_compiled_{os.getpid()}")
    os.environ["ONT_EMULATE_JIT"] = (f"echo x >> {log} && c++ -std=c++17 -O1 -fPIC -shared -DONT_EMULATE "
                                     f"-ffp-contract=off -fsanitize=alignment -fvisibility=hidden -I{folder} -I{ROOT}/csrc -x c++ -o %s %s "
                                     f"{folder}/emulate/emulate.cc -lpthread")
    try:
        in_order()
        before = len(log.read_text().splitlines())
        made = session("""g (float[16, 64] x) => (float[16, 64] y) <float p = {0.25}, bool t = {1}> {
            a = Dropout(x, p, t)  b = Tanh(a)  c = Softmax(b)  d = Dropout(c, p, t)  e = Tanh(d)  f = Softmax(e)  h = Dropout(f, p, t)
            y = Tanh(h) }""")
        x = torch.randn(16, 64)
        (y,), _ = made.forward([x], b"\x00", generator(3, 0))
        at = 0
        want = x
        for layer in range(3):
            want, _, at = wanted(want, 0.25, 3, at)
            want = torch.tanh(want) if layer == 2 else torch.softmax(torch.tanh(want), -1)
        assert torch.allclose(y, want, rtol=1e-5, atol=1e-6)
        assert len(log.read_text().splitlines()) == before + 1, "one kernel for three layers"
    finally:
        del os.environ["ONT_EMULATE_JIT"]
        log.unlink(missing_ok=True)


def masks() -> None:
    """The mask that a node gives is of the same words; with nothing to drop the generator stays."""
    text = "g (float[9, 100] x) => (float[9, 100] y, bool[9, 100] m) <float p = {0.3}, bool t = {1}> { y, m = Dropout(x, p, t) }"
    x, given = place(torch.randn(9, 100)), generator(5, 400)
    y, _, after = wanted(x, 0.3, 5, 400)
    (got, mask), _ = session(text).forward([x], b"\x00", given)
    assert torch.equal(got, y) and torch.equal(mask, y != 0) and given.get_offset() == after
    for same in (text.replace("t = {1}", "t = {0}"), text.replace("p = {0.3}", "p = {0}")):
        (got, mask), _ = session(same).forward([x], b"\x00", given)
        assert torch.equal(got, x) and bool(mask.all()) and given.get_offset() == after
    (got, mask), _ = session(text.replace("p = {0.3}", "p = {1}")).forward([x], b"\x00", given)
    assert not got.any() and given.get_offset() == after, "with a ratio of 1 torch draws nothing"


def own_numbers() -> None:
    """Where contents decide about the graph, and in attention, the numbers are ours: other ones at each step,
    by the generator.
    """
    made = session("""g (float[40, 30] x) => (int64[N] y, float s) <float p = {0.5}, bool t = {1}, int64 zero = {0}, int64 one = {1}> {
        a = Dropout(x, p, t)  s = ReduceSum <keepdims = 0> (a)  n = Cast <to = 7> (s)  y = Range(zero, n, one) }""")
    x, given = place(torch.full((40, 30), 0.5)), generator(7, 0)  # what is kept counts one
    counts = []
    for step in range(1, 4):
        (y, total), _ = made.forward([x], b"\x00", given)
        assert len(y) == int(total) and given.get_offset() == 4 * step
        counts.append(len(y))
    assert all(450 < n < 750 for n in counts) and len(set(counts)) > 1, counts
    text = """g (float[2, 2, 40, 16] q, float[2, 2, 40, 16] k, float[2, 2, 40, 16] v) => (float[2, 2, 40, 16] o)
        <float p = {0.4}, bool t = {1}> { w = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul(q, w)  r = Softmax(s)
        d = Dropout(r, p, t)  o = MatMul(d, v) }"""
    attention = session(text)
    tensors = [place(torch.randn(2, 2, 40, 16)) for _ in range(3)]
    results = [attention.forward(tensors, b"\x00" * 3, given)[0][0]
               for given in (generator(1, 0), generator(1, 0), generator(1, 4))]
    assert torch.equal(results[0], results[1]) and not torch.allclose(results[0], results[2])
    assert any(op == "FusedAttention" for _, op, *_ in attention.timeline())


def modules() -> None:
    """ORTModule on a GPU: a model's dropout is eager's, forward and backward, and so is what torch draws behind it."""
    if not on_gpu():
        return
    from onnxtrain.ortmodule import ORTModule

    layers = [torch.nn.Linear(64, 128), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Dropout(0.3),
              torch.nn.Linear(128, 8)]
    model, x = torch.nn.Sequential(*layers).to(DEVICE), torch.randn(96, 64, device=DEVICE)
    found = []
    for module in (model, ORTModule(model)):
        module(x)
        torch.manual_seed(11)
        model.zero_grad()
        for _ in range(4):
            loss = module(x).square().mean()
            loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(5, device=DEVICE)])
    for a, b in zip(*found):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


CHECKS: list[Callable[[], None]] = [known_answers, same_numbers, in_order, compiled, masks, own_numbers, modules]


def main(plugin: str, device: str, part: str = "0/1") -> None:
    global DEVICE
    DEVICE = device
    _C.open_plugin(plugin or None)
    # Steps that are timed are not replayed.
    run_checks(every_nth(CHECKS, part), lambda check: _C.set_timing(check is own_numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
