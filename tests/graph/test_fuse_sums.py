"""The gradient of a linear layer's bias comes from the product that is its weight's gradient."""

import re

import onnx
import pytest
import torch
from onnx import helper
from test_fuse_elementwise import step

from onnxtrain import _C

CODE = {torch.float32: 1, torch.float64: 11, torch.bfloat16: 16}


@pytest.fixture(autouse=True)
def passes_as_they_were():
    yield
    _C.disable_passes([])


def model_of(nodes, shapes, dtype, outputs=("y",)):
    values = [helper.make_tensor_value_info(name, CODE[dtype], shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name=name) for name in outputs])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def linear(shape, out, dtype=torch.float32):
    """y = x w + b."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])]
    shapes = {"x": shape, "w": [shape[-1], out], "b": [out]}
    return model_of(nodes, shapes, dtype), shapes


def gemm(shape, out, dtype=torch.float32, trans_b=0):
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=trans_b)]
    shapes = {"x": shape, "w": [out, shape[-1]] if trans_b else [shape[-1], out], "b": [out]}
    return model_of(nodes, shapes, dtype), shapes


def turned(shape, out, dtype=torch.float32):
    """What torch.nn.Linear is exported as."""
    nodes = [helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["p"]),
             helper.make_node("Add", ["b", "p"], ["y"])]
    shapes = {"x": shape, "w": [out, shape[-1]], "b": [out]}
    return model_of(nodes, shapes, dtype), shapes


def drawn(shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes.values()]


def reductions(text):
    return len(re.findall(r"= (?:ai\.onnxtrain\.SumTo|ReduceSum)\b", text))


def both(model, tensors):
    _C.disable_passes(["fuse_sums"])
    apart, plain = step(model, tensors)
    _C.disable_passes([])
    fused, text = step(model, tensors)
    for want, got in zip(apart, fused, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)  # of some way or other
    return plain, text


def with_gradient(build, shape, out, dtype=torch.float32, **kwargs):
    """The model with dy = 0.5 tanh'(y): a gradient that is computed, so that something is summed."""
    model, shapes = build(shape, out, dtype, **kwargs)
    m = onnx.load_from_string(model)
    m.graph.node.append(helper.make_node("Tanh", ["y"], ["z"]))
    m.graph.output[0].name = "z"
    return m.SerializeToString(), shapes


@pytest.mark.parametrize("build, kwargs", [(linear, {}), (turned, {}), (gemm, {}), (gemm, {"trans_b": 1})])
@pytest.mark.parametrize("shape", [[64, 96], [700, 33], [1, 40], [1030, 512]], ids=str)
def test_layers(build, kwargs, shape):
    """In two dims the weight's gradient has the output's transposed where the weight is stored (out, in)."""
    model, shapes = build(shape, 130, **kwargs)
    tensors = drawn(shapes, torch.float32)
    plain, text = both(model, tensors)
    outputs, _ = step(model, tensors)
    assert torch.allclose(outputs[3], torch.full([130], 0.5 * shape[0]), rtol=1e-5)
    transposed = build is turned or kwargs
    assert reductions(plain) == 1 and reductions(text) == (0 if transposed else 1), text


@pytest.mark.parametrize("shape", [[5, 7, 96], [35, 20, 200], [2, 3, 4, 64]], ids=str)
def test_views_between(shape):
    model, shapes = turned(shape, 600)
    plain, text = both(model, drawn(shapes, torch.float32))
    assert reductions(plain) == 1 and reductions(text) == 0, text


def test_what_a_group_computes_is_its_own():
    """fuse_reductions comes first: the gradient is summed where it is computed."""
    model, shapes = with_gradient(turned, [512, 64], 300)
    plain, text = both(model, drawn(shapes, torch.float32))
    assert reductions(plain) == reductions(text) == 0 and "FusedReduce" in text


@pytest.mark.parametrize("dtype", [torch.float64])
def test_other_dtypes_stay(dtype):
    model, shapes = turned([30, 40], 50, dtype)
    plain, text = both(model, drawn(shapes, dtype))
    assert reductions(plain) == reductions(text) == 1


def test_bias_of_two_layers():
    """Its gradient is a sum of two: one of them comes from a product, wherever the readers stand."""
    nodes = [helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["p"]),
             helper.make_node("Add", ["p", "b"], ["h"]), helper.make_node("MatMul", ["h", "t"], ["q"]),
             helper.make_node("Add", ["q", "b"], ["y"])]
    shapes = {"x": [70, 48], "w": [48, 48], "b": [48]}
    model = model_of(nodes, shapes, torch.float32)
    tensors = drawn(shapes, torch.float32)
    both(model, tensors)
    got, _ = step(model, tensors)
    x, w, b = (t.double().requires_grad_() for t in tensors)
    y = ((x @ w.T + b) @ w.T) + b
    y.backward(torch.full_like(y, 0.5))
    for mine, want in zip(got[1:], (x.grad, w.grad, b.grad), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-4, atol=1e-4)


def test_a_bias_that_is_no_row_stays():
    """Summed over another dim as well, or not at all."""
    nodes = [helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["p"]),
             helper.make_node("Add", ["p", "b"], ["y"])]
    for bias in ([], [1], [40, 1], [40, 30]):
        model = model_of(nodes, {"x": [40, 20], "w": [30, 20], "b": bias}, torch.float32)
        plain, text = both(model, drawn({"x": [40, 20], "w": [30, 20], "b": bias}, torch.float32))
        assert reductions(plain) == reductions(text)
