"""Rows of a Gather's gradient added to another gradient in place; other readers keep the nodes apart."""

import pytest
import torch
from onnx import helper
from test_fuse_gemm import random, step

from onnxtrain import _C

ELEM = {torch.float32: 1, torch.float64: 11, torch.bfloat16: 16, torch.float16: 10}


def parts_session(dtype, index_shape, width=6):
    """Three reads of one table, whose gradients meet in it, and one of the whole."""
    import numpy as np
    from onnx import numpy_helper

    count = int(np.prod(index_shape, dtype=int))
    constants = [numpy_helper.from_array(np.array([(3 * k + j) % 5 - (k == 1) for j in range(count)],
                                                  dtype=np.int64).reshape(index_shape), f"i{k}") for k in range(3)]
    nodes = [helper.make_node("Neg", ["x"], ["t"])]
    nodes += [helper.make_node("Gather", ["t", f"i{k}"], [f"g{k}"], axis=1) for k in range(3)]
    nodes += [helper.make_node("Mul", ["t", "c"], ["whole"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info(n, ELEM[dtype], [2, 5, width])
                                           for n in ("x", "c")],
                              [helper.make_tensor_value_info(n, ELEM[dtype], None)
                               for n in ("g0", "g1", "g2", "whole")], constants)
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString()), \
        [torch.from_numpy(np.array(numpy_helper.to_array(c))) for c in constants]


@pytest.mark.parametrize("dtype", ELEM, ids=str)
@pytest.mark.parametrize("index_shape, width", [((), 6), ((1,), 6), ((2, 4), 6), ((), 33001), ((2, 1), 9001)], ids=str)
def test_rows(index_shape, width, dtype):
    session, indices = parts_session(dtype, index_shape, width)
    x, c = random(2, 5, width, dtype=dtype, seed=4), random(2, 5, width, dtype=dtype, seed=5)
    shape = (2, *index_shape, width)
    dys = [random(*shape, dtype=dtype, seed=6 + k) for k in range(3)] + [random(2, 5, width, dtype=dtype, seed=9)]
    got, text = step(session, [x, c], dys)
    x64 = x.double().requires_grad_()
    t = -x64
    outs = [t[:, i.where(i >= 0, i + 5)] for i in indices] + [t * c.double()]
    sum((o * d.double()).sum() for o, d in zip(outs, dys)).backward()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert (got[4].double() - x64.grad).abs().max() <= tolerance * x64.grad.abs().max()
    one = index_shape in ((), (1,))
    assert " = Add (" not in text and " = Cast " not in text, text
    _C.disable_passes(["fuse_gradients", "fuse_elementwise"])
    try:
        apart, text = step(parts_session(dtype, index_shape, width)[0], [x, c], dys)
    finally:
        _C.disable_passes([])
    assert "Add" in text
    if one:
        assert torch.equal(got[4], apart[4])


def test_absent_gradients():
    """Parts that no gradient reaches add nothing."""
    x, c = random(2, 5, 6, dtype=torch.float32, seed=4), random(2, 5, 6, dtype=torch.float32, seed=5)
    session, _ = parts_session(torch.float32, ())
    dys = [random(2, 6, dtype=torch.float32, seed=6), None, None, random(2, 5, 6, dtype=torch.float32, seed=9)]
    got, text = step(session, [x, c], dys)
    assert text.count("GatherGrad") >= 1
    want = -(dys[3] * c)
    want[:, 0] -= dys[0]
    assert (got[4] - want).abs().max() <= 1e-6 and torch.equal(got[5], -x * dys[3])


def test_leaves_the_program_as_it_was():
    """A second run of the same program has the same numbers: nothing that is read again was added to."""
    x, c = random(2, 5, 6, dtype=torch.float32, seed=4), random(2, 5, 6, dtype=torch.float32, seed=5)
    session, _ = parts_session(torch.float32, (2, 4))
    dys = [random(2, 2, 4, 6, dtype=torch.float32, seed=6 + k)
           for k in range(3)] + [random(2, 5, 6, dtype=torch.float32, seed=9)]
    kept = [d.clone() for d in dys]
    first, _ = step(session, [x, c], dys)
    second, _ = step(session, [x, c], dys)
    assert all(torch.equal(a, b) for a, b in zip(first, second)) and all(torch.equal(a, b) for a, b in zip(dys, kept))
