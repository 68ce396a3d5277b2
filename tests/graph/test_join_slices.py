"""The gradients of slices that do not overlap are concatenated."""

import pytest
import torch
from onnx import helper
from onnx import numpy_helper as to_onnx
from test_fuse_elementwise import step
from test_fuse_sums import drawn, model_of

from onnxtrain import _C

SHAPE = [4, 12, 6]


@pytest.fixture(autouse=True)
def passes_as_they_were():
    yield
    _C.disable_passes([])


def ints(name, values):
    return helper.make_node("Constant", [], [name], value=to_onnx.from_array(torch.tensor(values).numpy()))


def sum_of_slices(slices, tail=(), dtype=torch.float32):
    """y = the sum over slices of -x of sum(tanh(slice)) * k, and the sums of `tail`, operators on -x."""
    nodes, names = [helper.make_node("Neg", ["x"], ["h"])], []
    for i, (axis, start, end, *stride) in enumerate(slices):
        for what, value in (("s", start), ("e", end), ("a", axis), ("d", stride[0] if stride else 1)):
            nodes.append(ints(f"{what}{i}", [value]))
        nodes += [helper.make_node("Slice", ["h", f"s{i}", f"e{i}", f"a{i}", f"d{i}"], [f"p{i}"]),
                  helper.make_node("Tanh", [f"p{i}"], [f"q{i}"]),
                  helper.make_node("ReduceSum", [f"q{i}"], [f"r{i}"], keepdims=0),
                  helper.make_node("Mul", [f"r{i}", "k"], [f"z{i}"])]
        names.append(f"z{i}")
    for i, op in enumerate(tail):
        nodes += [helper.make_node(op, ["h"], [f"u{i}"]), helper.make_node("ReduceSum", [f"u{i}"], [f"t{i}"], keepdims=0)]
        names.append(f"t{i}")
    nodes.append(helper.make_node("Sum", names, ["y"]))
    shapes = {"x": SHAPE, "k": []}
    return model_of(nodes, shapes, dtype), drawn(shapes, dtype)


def count(text, op):
    return text.count(f"= {op}") + text.count(f"ai.onnxtrain.{op}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slices, tail, left", [
    ([(1, i, i + 1) for i in range(12)], (), 0),
    ([(1, 8, 12), (1, 0, 3), (1, 5, 7)], (), 0),
    ([(2, 0, 3), (2, 3, 6)], ("Tanh", "Sin"), 0),
    ([(1, 0, 4), (1, 3, 6), (1, 6, 9)], (), 1),
    ([(1, 0, 4), (2, 0, 3), (1, 4, 9)], (), 1),
    ([(1, 0, 12, 2), (1, 1, 12, 2)], (), 2),
    ([(1, 0, 4)], ("Tanh",), 1),
], ids=["all", "gaps", "others", "overlap", "two axes", "strides", "one"])
def test_gradients_are_those_of_the_slices(slices, tail, left, dtype):
    model, tensors = sum_of_slices(slices, tail, dtype)
    close = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}  # sums in another order
    _C.disable_passes(["join_slices"])
    apart, plain = step(model, tensors)
    _C.disable_passes([])
    joined, text = step(model, tensors)
    for want, got in zip(apart, joined, strict=True):
        torch.testing.assert_close(got, want, **close)
    assert count(plain, "PutSlice") == len(slices)
    assert count(text, "PutSlice") == left
    x, k = tensors[0].clone().requires_grad_(), tensors[1]
    h = -x
    total = sum(h[(slice(None),) * axis + (slice(start, end, *stride),)].tanh().float().sum() * k.float()
                for axis, start, end, *stride in slices)
    total = total + sum(getattr(torch, op.lower())(h).float().sum() for op in tail)
    want, = torch.autograd.grad(0.5 * total, x)  # step() has dy = 0.5
    torch.testing.assert_close(joined[1], want, **close)


def test_a_slice_of_everything_is_no_copy():
    """The first of x[:, i:j] is one; one that mirrors is not."""
    for stride, left in ((1, 0), (-1, 1)):
        ends = (0, 2**62) if stride > 0 else (2**62, -2**62)
        model, (x, k) = sum_of_slices([(0, *ends, stride)])
        (_, dx, _), text = step(model, [x, k])
        assert count(text.split("# backward")[0], "Slice") == left
        torch.testing.assert_close(dx, -0.5 * (1 - x.tanh() ** 2) * k)
