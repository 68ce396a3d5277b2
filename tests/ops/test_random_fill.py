"""RandomNormal, RandomUniform, Bernoulli, Multinomial: distributions, seeds, independence of elements,
nodes and runs.
"""

import math

import numpy as np
import pytest
import torch
from onnx import TensorProto, ValueInfoProto, helper

from onnxtrain import _C

N = 200_000


def draw(op_type, key=0, x=None, nodes=1, opset=22, **attrs):
    """Outputs of `nodes` equal nodes as float64 arrays."""
    inputs = ([] if x is None
              else [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)])
    made = [helper.make_node(op_type, ["x"] if inputs else [], [f"y{i}"], **attrs) for i in range(nodes)]
    graph = helper.make_graph(made, "draw", inputs, [ValueInfoProto(name=f"y{i}") for i in range(nodes)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    outputs, _ = _C.Session(model.SerializeToString()).forward([torch.from_numpy(x)] if inputs else [],
                                                               bytes(len(inputs)), key)
    return [o.double().numpy() for o in outputs] if nodes > 1 else outputs[0].double().numpy()


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_uniform(dtype):
    y = draw("RandomUniform", shape=[N], low=0.0, high=1.0, dtype=dtype)
    assert y.min() >= 0 and y.max() < 1
    assert abs(y.mean() - 0.5) < 5 / math.sqrt(12 * N) + (2**-8 if dtype == TensorProto.BFLOAT16 else 2**-11
                                                          if dtype == TensorProto.FLOAT16 else 0)
    assert abs(y.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(y[:-1], y[1:])[0, 1]) < 5 / math.sqrt(N)


def test_uniform_range():
    y = draw("RandomUniformLike", x=np.zeros((4, 500), np.float32), low=-3.0, high=5.0)
    assert y.shape == (4, 500) and -3 <= y.min() < -2.9 and 4.9 < y.max() < 5


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.DOUBLE])
def test_normal(dtype):
    y = (draw("RandomNormal", shape=[N], mean=2.0, scale=3.0, dtype=dtype) - 2) / 3
    assert abs(y.mean()) < 5 / math.sqrt(N) and abs(y.var() - 1) < 5 * math.sqrt(2 / N)
    assert abs((y**3).mean()) < 5 * math.sqrt(15 / N) and abs((y**4).mean() - 3) < 5 * math.sqrt(96 / N)
    for at in (-2, -1, 0, 1, 2):
        p = 0.5 * math.erfc(-at / math.sqrt(2))
        assert abs((y < at).mean() - p) < 5 * math.sqrt(p * (1 - p) / N)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL])
def test_bernoulli(dtype):
    p = np.repeat(np.array([0.0, 0.25, 0.9, 1.0], np.float32), N // 4)
    y = draw("Bernoulli", x=p, dtype=dtype).reshape(4, -1)
    assert not y[0].any() and y[3].all() and set(np.unique(y)) == {0, 1}
    for row, q in ((y[1], 0.25), (y[2], 0.9)):
        assert abs(row.mean() - q) < 5 * math.sqrt(q * (1 - q) / row.size)


def test_multinomial():
    x = np.log(np.array([[0.1, 0.2, 0.7], [5.0, 1e-30, 5.0]], np.float32))
    y = draw("Multinomial", x=x, sample_size=20_000, dtype=TensorProto.INT64)
    for row, p in zip(y, [[0.1, 0.2, 0.7], [0.5, 0, 0.5]]):
        for k in range(3):
            assert abs((row == k).mean() - p[k]) <= 5 * math.sqrt(p[k] * (1 - p[k]) / row.size)


@pytest.mark.parametrize("op_type, attrs", [("RandomUniform", {}), ("RandomNormal", {})])
def test_seeds(op_type, attrs):
    first, second = draw(op_type, 1, nodes=2, shape=[1000])
    assert not np.array_equal(first, second), "two nodes draw the same numbers"
    assert np.array_equal(first, draw(op_type, 1, nodes=2, shape=[1000])[0]), "the same key gives the same numbers"
    assert not np.array_equal(first, draw(op_type, 2, nodes=2, shape=[1000])[0]), "another run draws others"
    assert not np.array_equal(first, draw(op_type, 1, nodes=2, shape=[1000], seed=7.0)[0]), "attribute seed"


def test_threads_do_not_matter():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = draw("RandomNormal", 3, shape=[50_000])
        torch.set_num_threads(2)
        assert np.array_equal(one, draw("RandomNormal", 3, shape=[50_000]))
    finally:
        torch.set_num_threads(before)


def test_errors():
    with pytest.raises(TypeError, match="int32"):
        draw("RandomNormal", shape=[3], dtype=TensorProto.INT32)
    with pytest.raises(ValueError, match="shape"):
        draw("RandomUniform")
    with pytest.raises(ValueError, match="sample_size"):
        draw("Multinomial", x=np.zeros((1, 2), np.float32), sample_size=0)
