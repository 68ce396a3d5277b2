"""Each library's GEMM, and the reference, with scales, transposes and a row that is added."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from onnxtrain import _C

# m, n, k: results of fewer rows than threads, sizes beside multiples of a line; A, B or C the largest
SHAPES = [(1, 1, 1), (3, 2000, 2100), (64, 500, 784), (500, 784, 64), (784, 10, 500), (1040, 33, 700), (17, 31, 33),
          (300, 1403, 40), (257, 255, 256)]
KINDS = {torch.float32: onnx.TensorProto.FLOAT, torch.float64: onnx.TensorProto.DOUBLE}
BACKENDS = [name for name in _C.build_info()["gemm"] if name != "native"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def gemm(tensors, **attributes):
    """ONNX's Gemm of two or three tensors by the engine."""
    names = ["a", "b", "c"][:len(tensors)]
    infos = [helper.make_tensor_value_info(name, KINDS[t.dtype], t.shape) for name, t in zip(names, tensors)]
    graph = helper.make_graph([helper.make_node("Gemm", names, ["y"], **attributes)], "g", infos,
                              [onnx.ValueInfoProto(name="y")])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
                         .SerializeToString())
    return session.forward(tensors, b"\0" * len(tensors))[0][0]


def turned(x, trans):
    return x.t() if trans else x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [1, 3], ids="{} threads".format)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape, trans_b, trans_a, dtype, threads, backend, monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_GEMM", backend)
    torch.set_num_threads(threads)
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    a, b, row = (torch.rand(dims, generator=generator, dtype=dtype) * 2 - 1
                 for dims in ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n), (n,)))
    left, right = turned(a, trans_a).double(), turned(b, trans_b).double()
    for tensors in ((a, b), (a, b, row)):
        got = gemm(tensors, transA=int(trans_a), transB=int(trans_b), alpha=0.5, beta=2.0)
        want = 0.5 * left @ right + (2 * row.double() if len(tensors) == 3 else 0)
        terms = left.abs() @ right.abs() + 2
        assert got.dtype == dtype and got.shape == want.shape
        assert ((got - want).abs() <= torch.finfo(dtype).eps * np.sqrt(k + 4) * terms).all()
