"""BatchNormalization with a residual and a Relu behind it becomes one node, and so do their gradients; other readers
keep them
apart. Against torch in float64, with gradients of every subset of the inputs."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from test_fuse_gemm import random, session_of

from onnxtrain import _C

EPS, MOMENTUM = 2.0**-10, 0.75
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
SHAPES = [(4, 3, 5), (3, 5, 1), (2, 3, 7, 7), (2, 2, 33, 40), (5, 4, 1, 17), (2, 1, 2, 3, 5), (37, 3)]


def norm(x, y, training, k=0, statistics=False):
    outputs = [y, f"mean{k}", f"var{k}"] if statistics else [y]
    return helper.make_node("BatchNormalization", [x, *(f"{n}{k}" for n in "sbmv")], outputs, epsilon=EPS,
                            momentum=MOMENTUM, training_mode=int(training))


def operands(shape, dtype, k=0):
    values = {f"{n}{k}": random(shape[1], dtype=dtype, seed=10 * k + i) for i, n in enumerate("sbmv", 3)}
    values[f"v{k}"] = values[f"v{k}"].abs() + 0.5
    return values


def reference(x, values, training, k=0):
    s, b, m, v = (values[f"{n}{k}"] for n in "sbmv")
    return F.batch_norm(x, None if training else m, None if training else v, s, b, training, 0.1, EPS)


def wide(inputs, wanted):
    return {n: t.double().requires_grad_(n in wanted) for n, t in inputs.items()}


def check(session, inputs, dys, model, wanted, dtype):
    """Outputs, and gradients of the inputs `wanted`, against model(inputs in float64)."""
    names, tensors = list(inputs), list(inputs.values())
    ys, run = session.forward(tensors, bytes(n in wanted for n in names))
    leaves = wide(inputs, wanted)
    expected = model(leaves)
    for got, want in zip(ys, expected, strict=True):
        assert got.dtype == dtype and (got.double() - want).abs().max() <= TOLERANCE[dtype] * max(1, want.abs().max())
    if not wanted:
        assert run is None
        return session.text("program")
    saved = [tensors[i] for i in run.saved_inputs] + [ys[i] for i in run.saved_outputs]
    grads = run.backward(saved, [d if flag else None for d, flag in zip(dys, run.differentiable)])
    given = [(y, d.double()) for y, d in zip(expected, dys) if d is not None and y.requires_grad]
    wants = torch.autograd.grad([y for y, _ in given], [leaves[n] for n in wanted], [d for _, d in given])
    for name, want in zip(wanted, wants):
        got = grads[names.index(name)]
        assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * max(1, want.abs().max()), name
    return session.text("program")


def subsets(names):
    return [s for n in range(len(names) + 1) for s in itertools.combinations(names, n)]


KERNELS = ["rows", "simd", "ref"]


@pytest.fixture(params=KERNELS)
def kernels(request):
    kept = {request.param, "ref"} if request.param == "rows" else {request.param}  # rows leaves long pieces to others
    _C.disable_kernels([f"batchnorm_{part}{other}" for part in ("", "grad_") for other in KERNELS if other not in kept])
    yield
    _C.disable_kernels([])


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("form", ["relu", "add", "add relu", "radd relu"])
def test_forms(form, training, shape, dtype, kernels):
    inputs = {"x": random(*shape, dtype=dtype, seed=1), "r": random(*shape, dtype=dtype, seed=2),
              **operands(shape, dtype)}
    nodes = [norm("x", "n", training, statistics=training)]
    at = "n"
    if "add" in form:
        nodes.append(helper.make_node("Add", ["r", "n"] if "radd" in form else ["n", "r"], ["a"]))
        at = "a"
    else:
        del inputs["r"]
    if "relu" in form:
        nodes.append(helper.make_node("Relu", [at], ["f"]))
        at = "f"
    nodes[-1].output[0] = "y"
    session = session_of(nodes, inputs, ["y", "mean0", "var0"] if training else ["y"])

    def model(t):
        y = reference(t["x"], t, training)
        y = y + t["r"] if "add" in form else y
        y = y.relu() if "relu" in form else y
        axes = [0, *range(2, len(shape))]
        mean, var = t["x"].mean(axes), t["x"].var(axes, unbiased=False)
        statistics = [MOMENTUM * old + (1 - MOMENTUM) * new for old, new in ((t["m0"], mean), (t["v0"], var))]
        return [y, *(s.detach() for s in statistics)] if training else [y]

    dys = [random(*shape, dtype=dtype, seed=3), None, None][:3 if training else 1]
    names = [n for n in ("x", "s0", "b0", "r") if n in inputs]
    for wanted in subsets(names) if shape == SHAPES[0] else [tuple(names), ()]:
        text = check(session, inputs, dys, model, wanted, dtype)
        assert "FusedBatchNorm" in text and "Add" not in text and "ai.onnx.Relu" not in text, text
        if wanted == tuple(names) and "r" not in inputs and "relu" in form:
            grad = next(line for line in text.splitlines() if "BatchNormGrad" in line)
            assert grad.endswith(", b0)") and "ReluGrad" not in text, text


@DTYPES
@pytest.mark.parametrize("shortcut", [False, True], ids=["identity", "norm"])
def test_block(shortcut, dtype):
    """A residual block as ResNet has it: gradients meet, and neither masked one is written down."""
    shape = (3, 4, 6, 6)
    inputs = {"x": random(*shape, dtype=dtype, seed=1), "w": random(4, 4, 3, 3, dtype=dtype, seed=2),
              **operands(shape, dtype, 0), **operands(shape, dtype, 1), **operands(shape, dtype, 2)}
    nodes = [norm("x", "n0", True, 0), helper.make_node("Relu", ["n0"], ["i"]),
             helper.make_node("Conv", ["i", "w"], ["c"], pads=[1, 1, 1, 1]), norm("c", "n1", True, 1, statistics=True),
             helper.make_node("Sum", ["mean1", "b1"], ["z"])]
    if shortcut:
        nodes.append(norm("i", "n2", True, 2, statistics=True))
    nodes += [helper.make_node("Add", ["n1", "n2" if shortcut else "i"], ["a"]), helper.make_node("Relu", ["a"], ["f"]),
              helper.make_node("Conv", ["f", "w"], ["y"], pads=[1, 1, 1, 1])]
    if not shortcut:
        inputs = {n: t for n, t in inputs.items() if not n.endswith("2")}
    session = session_of(nodes, inputs, ["y", "z"])

    def model(t):
        i = reference(t["x"], t, True, 0).relu()
        c = F.conv2d(i, t["w"], padding=1)
        a = reference(c, t, True, 1) + (reference(i, t, True, 2) if shortcut else i)
        mean = MOMENTUM * t["m1"] + (1 - MOMENTUM) * c.mean((0, 2, 3))
        return [F.conv2d(a.relu(), t["w"], padding=1), mean.detach() + t["b1"]]

    names = [n for n in inputs if n[0] not in "mv"]
    dys = [random(*shape, dtype=dtype, seed=3), None]
    text = check(session, inputs, dys, model, tuple(names), dtype)
    assert text.count("FusedBatchNorm") == 2 and " = ai.onnxtrain.ReluGrad" not in text, text
    grads = [line for line in text.splitlines() if "BatchNormGrad" in line]
    assert [line.split("(")[-1].count(",") for line in grads] == [5] * (len(grads) - 1) + [4], text
    for wanted in (("w",), ("x",), ("s1", "b0"), ("b1",)):
        check(session, inputs, dys, model, wanted, dtype)


@DTYPES
def test_by_name(dtype):
    """Without the pass the nodes are apart, and the numbers are the same to rounding."""
    shape = (4, 3, 9, 9)
    inputs = {"x": random(*shape, dtype=dtype, seed=1), "r": random(*shape, dtype=dtype, seed=2),
              **operands(shape, dtype)}
    nodes = [norm("x", "n", True), helper.make_node("Add", ["n", "r"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    results = []
    for off in ([], ["fuse_batchnorm"]):
        _C.disable_passes(off)
        try:
            names = list(inputs)
            session = session_of(nodes, inputs)
            tensors = list(inputs.values())
            ys, run = session.forward(tensors, bytes(n in "xrs0b0" for n in names))
            saved = [tensors[i] for i in run.saved_inputs] + [ys[i] for i in run.saved_outputs]
            grads = run.backward(saved, [random(*shape, dtype=dtype, seed=3)])
            assert ("FusedBatchNorm" in session.text("program")) == (not off)
        finally:
            _C.disable_passes([])
        results.append([*ys, *(g for g in grads if g is not None)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("other", ["output", "reader", "broadcast", "itself", "statistics"])
def test_stays_apart(other, dtype):
    """Somebody else reads y; the residual is a row, or y itself; a running mean is read in between."""
    shape = (4, 3, 5)
    inputs = {"x": random(*shape, dtype=dtype, seed=1), "r": random(*((1, 3, 1) if other == "broadcast" else shape),
                                                                    dtype=dtype, seed=2),
              **operands(shape, dtype)}
    between = [helper.make_node("Exp", ["n"], ["z"])] if other == "reader" else []
    if other == "statistics":
        between = [helper.make_node("Sum", ["mean0", "b0"], ["z"]),
                   helper.make_node("Unsqueeze", ["z", "axes"], ["zz"]),
                   helper.make_node("Mul", ["r", "zz"], ["rr"])]
    residual = {"itself": "n", "statistics": "rr"}.get(other, "r")
    nodes = [helper.make_node("Constant", [], ["axes"], value_ints=[0, 2]), norm("x", "n", True, statistics=True),
             *between, helper.make_node("Add", ["n", residual], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    outputs = ["y", "n"] if other == "output" else ["y", "z"] if other == "reader" else ["y"]
    session = session_of(nodes, inputs, outputs)

    def model(t):
        n = reference(t["x"], t, True)
        mean = (MOMENTUM * t["m0"] + (1 - MOMENTUM) * t["x"].mean((0, 2))).detach() + t["b0"]
        r = {"itself": n, "statistics": t["r"] * mean[None, :, None]}.get(other, t["r"])
        return [(n + r).relu(), *({"output": [n], "reader": [n.exp()]}.get(other, []))]

    dys = [random(*shape, dtype=dtype, seed=k) for k in (3, 4)][:len(outputs)]
    wanted = ("x", "s0", "b0") if other == "itself" else ("x", "r", "s0", "b0")
    text = check(session, inputs, dys, model, wanted, dtype)
    assert "FusedBatchNorm" not in text, text


def test_step_is_repeatable():
    """What runs in place of an operand leaves the caller's tensors as they were."""
    shape, dtype = (2, 3, 4, 4), torch.float32
    inputs = {"x": random(*shape, dtype=dtype, seed=1), "r": random(*shape, dtype=dtype, seed=2),
              **operands(shape, dtype)}
    inputs = dict(inputs.items())
    nodes = [norm("x", "n", False), helper.make_node("Add", ["n", "r"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    session = session_of(nodes, inputs)
    kept = {n: t.clone() for n, t in inputs.items()}
    first, _ = session.forward(list(inputs.values()), bytes(len(inputs)))
    second, _ = session.forward(list(inputs.values()), bytes(len(inputs)))
    assert torch.equal(first[0], second[0]) and all(torch.equal(kept[n], t) for n, t in inputs.items())


@DTYPES
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("shape", [(3, 4, 5, 7), (2, 3, 33, 40), (64, 40)], ids=str)
def test_gradients_pass_where_the_result_is_nan(residual, shape, dtype, kernels):
    """A Relu hands on what comes back, as torch's does: earlier layers see that something is wrong."""
    inputs = {"x": random(*shape, dtype=dtype, seed=1), "r": random(*shape, dtype=dtype, seed=2),
              **operands(shape, dtype)}
    inputs["r" if residual else "x"].view(-1)[shape[-1] + 3] = float("nan")
    nodes = [norm("x", "n", True), helper.make_node("Add", ["n", "r"], ["a"])][:1 + residual]
    nodes.append(helper.make_node("Relu", [nodes[-1].output[0]], ["y"]))
    if not residual:
        del inputs["r"]
    session, names = session_of(nodes, inputs), list(inputs)
    wanted = [n for n in ("x", "s0", "b0", "r") if n in inputs]
    tensors, dy = list(inputs.values()), random(*shape, dtype=dtype, seed=3)
    ys, run = session.forward(tensors, bytes(n in wanted for n in names))
    grads = run.backward([tensors[i] for i in run.saved_inputs] + [ys[i] for i in run.saved_outputs], [dy])
    leaves = wide(inputs, wanted)
    y = reference(leaves["x"], leaves, True) + (leaves["r"] if residual else 0)
    wants = torch.autograd.grad(y.relu(), [leaves[n] for n in wanted], dy.double())
    assert "FusedBatchNorm" in session.text("program")
    for name, want in zip(wanted, wants):
        torch.testing.assert_close(grads[names.index(name)].double(), want, rtol=1e-3 if dtype == torch.float32 else 1e-9,
                                   atol=1e-4 if dtype == torch.float32 else 1e-10, equal_nan=True)
