"""Winograd's convolution through its kernels against torch in float64, beside oneDNN's; what it takes and what it
declines.

The grid is sampled; ONNXTRAIN_TEST_SEED fixes it and is in each case's name, ONNXTRAIN_SLOW=1 makes it longer.
"""

import os
import random
import subprocess
import sys

import onnx
import pytest
import test_conv_onednn as in_bfloat16
import torch
import torch.nn.functional as F
from onnx import helper
from seeds import fixed_seed

from onnxtrain import _C

SEED = fixed_seed()
PARTS = ("conv", "conv_grad_input", "conv_grad_weight")
KERNELS = ("f32_winograd", "f32_onednn", "gemm", "ref")


@pytest.fixture(autouse=True)
def reset():
    threads = torch.get_num_threads()
    yield
    _C.disable_kernels([])
    _C.disable_passes([])
    torch.set_num_threads(threads)


def only(kernel):
    _C.disable_kernels([f"{part}_{other}" for part in PARTS for other in KERNELS if other != kernel])


def session(x, w, pads, bias=True, **attributes):
    names = ["x", "w", "b"] if bias else ["x", "w"]
    node = helper.make_node("Conv", names, ["y"], pads=pads, **attributes)
    shapes = (x.shape, w.shape, w.shape[:1])
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in zip(names, shapes)]
    graph = helper.make_graph([node], "conv", inputs, [onnx.ValueInfoProto(name="y")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())


def step(s, inputs, dy):
    """y, dx, dw and db (where there is a bias)."""
    outputs, run = s.forward(inputs, b"\1" * len(inputs))
    saved = [inputs[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    return [outputs[0], *run.backward(saved, [dy])]


def data(n, c, k, h, w, pads, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight, b = (torch.randn(*shape, generator=g) for shape in ((n, c, h, w), (k, c, 3, 3), (k,)))
    dy = torch.randn(n, k, h + pads[0] + pads[2] - 2, w + pads[1] + pads[3] - 2, generator=g)
    return x, weight, b, dy


def expected(x, w, b, dy, pads):
    x, w, b = (t.double().requires_grad_() for t in (x, w, b))
    y = F.conv2d(F.pad(x, (pads[1], pads[3], pads[0], pads[2])), w, b)
    y.backward(dy.double())
    return [y.detach(), x.grad, w.grad, b.grad]


def errors(got, want):
    """Largest error of each result, relative to its largest entry."""
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True)]


def check(case, limit=4e-6):
    n, c, k, h, w, pads = case
    x, weight, b, dy = data(*case)
    only("f32_winograd")
    s = session(x, weight, pads)
    got = step(s, [x, weight, b], dy)
    assert {k for _, k, _ in s.kernels() if k.startswith("conv")} == {f"{part}_f32_winograd" for part in PARTS}
    found = errors(got, expected(x, weight, b, dy, pads))
    assert max(found) < limit, (case, found)
    return got


def sampled(count):
    rng = random.Random(SEED)
    while count:
        n, c, k, h, w = (rng.randint(1, most) for most in (4, 70, 70, 38, 38))
        pads = [rng.randint(0, 2) for _ in range(4)]
        if h + pads[0] + pads[2] >= 3 and w + pads[1] + pads[3] >= 3:
            yield n, c, k, h, w, pads
            count -= 1


EDGES = [
    (1, 1, 1, 1, 1, [1, 1, 1, 1]), (1, 1, 1, 3, 3, [0, 0, 0, 0]), (1, 16, 32, 4, 4, [1, 1, 1, 1]),
    (1, 17, 33, 5, 5, [2, 2, 2, 2]), (3, 15, 31, 6, 7, [0, 1, 2, 0]), (2, 64, 64, 8, 8, [0, 0, 0, 0]),
    (1, 3, 20, 2, 530, [1, 1, 1, 1]), (1, 20, 3, 37, 1, [2, 2, 2, 2]),
    (9, 65, 40, 4, 4, [1, 1, 1, 1]), (40, 16, 16, 8, 4, [1, 1, 1, 1]), (5, 130, 16, 9, 12, [1, 0, 1, 0]),
]


@pytest.mark.parametrize("case", EDGES, ids=str)
def test_edges(case):
    _C.disable_passes(["conv_to_gemm"])  # takes a kernel that covers its input
    check(case)


@pytest.mark.parametrize("case", list(sampled(200 if os.environ.get("ONNXTRAIN_SLOW") == "1" else 12)),
                         ids=lambda case: f"seed{SEED}-{case}")
def test_sampled(case):
    check(case)


def test_results_do_not_depend_on_threads():
    """More groups of tiles than one, and more parts of a group than one."""
    for case in ((5, 40, 48, 19, 30, [1, 1, 1, 1]), (2, 16, 32, 40, 40, [1, 2, 0, 1])):
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(check(case))
        again = check(case)
        for other in (*results[1:], again):
            for a, b in zip(results[0][:3], other):
                assert torch.equal(a, b)


def test_threads_may_change_after_the_program_is_built():
    case = (3, 40, 48, 19, 30, [1, 1, 1, 1])
    x, w, b, dy = data(*case)
    only("f32_winograd")
    for before, after in ((2, 1), (1, 3)):
        torch.set_num_threads(before)
        s = session(x, w, case[-1])
        first = step(s, [x, w, b], dy)
        torch.set_num_threads(after)
        for got, want in zip(step(s, [x, w, b], dy), first):
            assert torch.equal(got, want)


def chosen(s):
    return sorted(k for _, k, _ in s.kernels() if k.startswith("conv"))


# volumes, channels, channels of the result, depth of filter and volume, height, width, pads (begins, ends)
VOLUMES = [
    (2, 16, 32, 3, 4, 12, 12, [1, 1, 1, 1, 1, 1]), (1, 48, 16, 2, 5, 9, 7, [0, 1, 2, 2, 0, 1]),
    (2, 7, 5, 1, 3, 10, 10, [0, 1, 1, 0, 1, 1]), (3, 32, 48, 4, 3, 13, 6, [2, 0, 0, 1, 2, 1]),
    (1, 16, 16, 3, 1, 24, 5, [1, 1, 1, 1, 1, 1]), (2, 16, 16, 1, 2, 8, 8, [2, 1, 1, 3, 1, 1]),
    (1, 16, 64, 5, 6, 19, 30, [4, 1, 1, 0, 1, 1]), (1, 32, 16, 2, 2, 9, 9, [0, 0, 0, 0, 2, 2]),
]


def check_volume(case):
    n, c, k, taps, depth, h, w, pads = case
    g = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(*shape, generator=g) for shape in ((n, c, depth, h, w), (k, c, taps, 3, 3), (k,)))
    wide = [t.double().requires_grad_() for t in (x, weight, b)]
    y = F.conv3d(F.pad(wide[0], (pads[2], pads[5], pads[1], pads[4], pads[0], pads[3])), *wide[1:])
    dy = torch.randn(y.shape, generator=g)
    y.backward(dy.double())
    only("f32_winograd")
    s = session(x, weight, pads)
    got = step(s, [x, weight, b], dy)
    assert {kernel for _, kernel, _ in s.kernels() if kernel.startswith("conv")} == {f"{p}_f32_winograd" for p in PARTS}
    found = errors(got, [y.detach(), *(t.grad for t in wide)])
    assert max(found) < 4e-6, (case, found)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", VOLUMES, ids=str)
def test_volumes(case, threads):
    torch.set_num_threads(threads)
    check_volume(case)


@pytest.mark.parametrize("isa", ["plain", "avx2"])
def test_instruction_sets(isa):
    """The same cases in a process that is held to fewer instructions."""
    code = f"""
import test_winograd as t
from onnxtrain import _C
assert _C.build_info()["isa"] in ({isa!r}, "plain")
for case in t.EDGES[2:] + list(t.sampled(2)):
    t.check(case)
for case in t.VOLUMES[:2]:
    t.check_volume(case)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "ONNXTRAIN_ISA": isa})


SHAPES = [(4, 64, 64, 32, 32), (8, 128, 128, 16, 16), (16, 256, 256, 8, 8), (32, 512, 512, 4, 4), (2, 32, 32, 64, 64),
          (2, 128, 256, 28, 28)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy_beside_the_direct_way(shape):
    """What the choice of the polynomials' points is for: at most about four times oneDNN's rounding,
    six allowed here.
    """
    pads = [1, 1, 1, 1]
    x, w, b, dy = data(*shape, pads)
    want = expected(x, w, b, dy, pads)
    found = {}
    for kernel in KERNELS[:2]:
        only(kernel)
        got = step(session(x, w, pads), [x, w, b], dy)
        found[kernel] = [((a.double() - e).square().mean().sqrt() / e.abs().max()).item()
                         for a, e in zip(got, want)][:3]
    for ours, direct in zip(found["f32_winograd"], found["f32_onednn"]):
        assert ours < 6 * direct + 1e-9, found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    """Whatever the direct way makes of it is not finite here either;
    it spreads no further than the tiles that hold it.
    """
    pads = [1, 1, 1, 1]
    x, w, b, dy = data(2, 20, 24, 13, 14, pads)
    x[1, 3, 6, 5] = value
    dy[0, 2, 7, 9] = value
    want = expected(x, w, b, dy, pads)
    only("f32_winograd")
    got = step(session(x, w, pads), [x, w, b], dy)
    for a, e in zip(got[:3], want):
        assert not a[~e.isfinite()].isfinite().any()
    assert got[0][0].isfinite().all() and got[1][1].isfinite().all()
    assert got[0][1, :, :4].isfinite().all() and got[0][1, :, 8:].isfinite().all()
    assert got[0][1, :, :, 8:].isfinite().all()
    clean = got[0].isfinite() & want[0].isfinite()
    assert torch.allclose(got[0][clean].double(), want[0][clean], atol=1e-4)


def test_bfloat16_has_one_of_two_ways():
    """In float32 between Casts, where oneDNN's kernel may win the comparison, or by oneDNN as it is; never without its
    kernel beside it in a comparison.
    """
    case = ((2, 64, 64, 64), (64, 64, 3, 3), 1, 1, 1, False)
    inputs = in_bfloat16.data(*case[:2], False)
    dy = torch.randn(2, 64, 64, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    wants, _ = in_bfloat16.expected(inputs, dy, 1, 1, 1)
    ways = {f"{part}_{kernel}" for part in PARTS for kernel in ("f32_winograd", "f32_onednn", "bf16_onednn")}
    for disabled in ([], ["winograd"]):
        _C.disable_passes(disabled)
        s = in_bfloat16.session(*case)
        got = step(s, inputs, dy)
        if in_bfloat16.MULTIPLIES:
            assert set(chosen(s)) <= ways, chosen(s)
        assert not disabled or not any("winograd" in k for k in chosen(s))
        for g, want in zip(got, wants, strict=True):
            assert ((g.double() - want).abs() <= 2.0**-8 * want.abs() + 4e-6 * want.abs().max()).all()
