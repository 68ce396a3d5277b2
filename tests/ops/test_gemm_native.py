"""Large products by our own kernel: of float32, of two bfloat16 parts each, and of bfloat16."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from onnxtrain import _C

# m, n, k: one of each, sides of tiles and their neighbours, several blocks and chunks, results that pass the caches
SHAPES = [(1, 1, 1), (6, 16, 3), (13, 31, 17), (14, 32, 512), (15, 33, 513), (113, 577, 200), (700, 41, 1300),
          (33, 900, 1025), (300, 14003, 40), (1100, 1100, 90), (64, 500, 784), (9, 2000, 2100), (50, 36, 1301),
          (29, 3, 9)]
TURNED = [(9000, 36, 700), (9000, 200, 1100), (24000, 200, 41)]  # where A is transposed, columns become rows
KINDS = {"float32": lambda: True, "bf16x3": lambda: _C.build_info()["split_products"],
         "bfloat16": lambda: has_native_bfloat16()}
FLAGS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.fixture(autouse=True)
def tiled(monkeypatch):
    if "native" not in _C.build_info()["gemm"]:
        pytest.skip("no kernel for this instruction set")
    monkeypatch.setenv("ONNXTRAIN_GEMM", "native")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def session_of(a, b, row=None, outputs=("y",), **attrs):
    """FusedMatMul of two tensors, and what it takes."""
    tensors = [a, b] if row is None else [a, b, row]
    names = ["a", "b", "c"][:len(tensors)]
    kind = {torch.float32: 1, torch.bfloat16: 16}[a.dtype]
    infos = [helper.make_tensor_value_info(n, kind, t.shape) for n, t in zip(names, tensors)]
    node = helper.make_node("FusedMatMul", names, list(outputs), domain="ai.onnxtrain", **attrs)
    graph = helper.make_graph([node], "g", infos, [onnx.ValueInfoProto(name=name) for name in outputs])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)]
    return _C.Session(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()), tensors


def has_native_bfloat16():
    """Where the environment asks for native kernels."""
    session, tensors = session_of(*[torch.ones(8, 8, dtype=torch.bfloat16)] * 2)
    session.forward(tensors, b"\0\0")
    return any(kernel == "matmul_half_native" for _, kernel, _ in session.kernels())


def product(a, b, row=None, **attrs):
    session, tensors = session_of(a, b, row, **attrs)
    return session.forward(tensors, b"\0" * len(tensors))[0][0]


def product_and_sums(a, b, row=None, **attrs):
    session, tensors = session_of(a, b, row, ("y", "sums"), **attrs)
    return session.forward(tensors, b"\0" * len(tensors))[0]


def operands(m, n, k, trans_a, trans_b, seed=0):
    rng = np.random.default_rng(seed)
    a, b = (torch.from_numpy(rng.uniform(-1, 1, shape)).float()
            for shape in ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)))
    return a, b, torch.from_numpy(rng.uniform(-1, 1, n)).float()


def exact(a, b, trans_a, trans_b):
    return (a.T if trans_a else a).double() @ (b.T if trans_b else b).double()


@pytest.mark.parametrize("bf16x3", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("trans_a, trans_b", FLAGS)
def test_against_float64(shape, trans_a, trans_b, bf16x3):
    if bf16x3 and not KINDS["bf16x3"]():
        pytest.skip("no tiles in this processor")
    a, b, row = operands(*shape, trans_a, trans_b)
    want = exact(a, b, trans_a, trans_b)
    attrs = {"transA": int(trans_a), "transB": int(trans_b), "bf16x3": bf16x3}
    bound = 2e-5 * shape[2] ** 0.5 if bf16x3 else 2e-6 + 6e-8 * shape[2]
    assert (product(a, b, **attrs) - want).abs().max() < bound
    assert (product(a, b, row, **attrs) - (want + row)).abs().max() < bound + 1e-6
    assert (product(a, b, alpha=0.5, **attrs) - 0.5 * want).abs().max() < bound


@pytest.mark.parametrize("shape", [(700, 41, 1300), (64, 500, 784), (300, 14003, 40), (68, 260, 785), (200, 36, 777)],
                         ids=str)
@pytest.mark.parametrize("trans_a, trans_b", FLAGS)
def test_any_number_of_threads(shape, trans_a, trans_b):
    """Every sum runs over k in the same order."""
    a, b, row = operands(*shape, trans_a, trans_b)
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(product(a, b, row, transA=int(trans_a), transB=int(trans_b)))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("n", [70, 67])
@pytest.mark.parametrize("kind", ["float32", "bf16x3", "bfloat16"])
def test_what_is_not_finite(kind, n):
    """It stays in its row and column; what is laid out beyond an edge meets nothing."""
    if not KINDS[kind]():
        pytest.skip("no such instructions")
    a, b, _ = operands(30, n, 41, False, False)
    a[7, 40], b[9, n - 2] = float("inf"), float("nan")
    if kind == "bfloat16":
        a, b = a.bfloat16(), b.bfloat16()
    got = product(a, b, bf16x3=int(kind == "bf16x3"))
    assert torch.equal(torch.isfinite(got), torch.isfinite(a.double() @ b.double()))
    assert torch.isfinite(got[:7, :n - 2]).all()


def test_of_no_element():
    assert product(torch.zeros(0, 5), torch.zeros(5, 3)).shape == (0, 3)
    assert product(torch.zeros(2, 0), torch.zeros(0, 3)).eq(0).all()


@pytest.mark.parametrize("shape", [*SHAPES, *TURNED, (9000, 60, 700), (2500, 2500, 1100)],
                         ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("way", ["native", "torch", "primitive", "bf16x3", "reference"])
def test_sums_of_what_is_read(shape, way, monkeypatch):
    """A summed along k: by our kernel while it lays A out, in a pass of their own beside the others."""
    if way == "bf16x3" and not KINDS["bf16x3"]():
        pytest.skip("no tiles in this processor")
    monkeypatch.setenv("ONNXTRAIN_GEMM", way if way in ("torch", "primitive") else "native")
    a, b, row = operands(*shape, True, False)
    attrs = {"transA": 1, "bf16x3": int(way == "bf16x3")}
    _C.disable_kernels(["matmul_native", "matmul_blas"] if way == "reference" else [])
    try:
        alone = product(a, b, **attrs)
        y, sums = product_and_sums(a, b, **attrs)
        added, again = product_and_sums(a, b, row, **attrs)
    finally:
        _C.disable_kernels([])
    assert torch.equal(y, alone) and torch.equal(sums, again)
    assert (added - (exact(a, b, True, False) + row)).abs().max() < 2e-5 * shape[2] ** 0.5
    assert sums.shape == (shape[0],) and (sums - a.double().sum(0)).abs().max() < 2e-6 + 1e-7 * shape[2]


@pytest.mark.parametrize("shape", [(700, 41, 1300), (9000, 60, 700), (2500, 2500, 1100), *TURNED], ids=str)
def test_sums_on_any_number_of_threads(shape):
    a, b, _ = operands(*shape, True, False)
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(product_and_sums(a, b, transA=1))
    assert all(torch.equal(first, other) for result in results[1:] for first, other in zip(results[0], result))


def test_sums_of_no_element():
    assert [t.shape for t in product_and_sums(torch.zeros(5, 0), torch.zeros(5, 3), transA=1)] == [(0, 3), (0,)]
    y, sums = product_and_sums(torch.ones(5, 2), torch.zeros(5, 0), transA=1)
    assert y.shape == (2, 0) and sums.tolist() == [5, 5]
    y, sums = product_and_sums(torch.zeros(0, 2), torch.zeros(0, 3), transA=1)
    assert y.eq(0).all() and sums.tolist() == [0, 0]


@pytest.mark.parametrize("what", ["not transposed", "bfloat16"])
def test_sums_that_there_are_not(what):
    dtype = torch.bfloat16 if what == "bfloat16" else torch.float32
    with pytest.raises(_C.UnsupportedError, match="sums of A need a transposed float32 matrix A"):
        product_and_sums(torch.ones(4, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype), transA=int(what == "bfloat16"))
