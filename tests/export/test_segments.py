"""Where a graph is cut for the calls that torch runs, and what its segments hand on to each other."""

from __future__ import annotations

import onnx.parser
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain._export.segments import cut
from onnxtrain.ortmodule import ORTModule

HEAD = '<ir_version: 10, opset_import: ["": 20, "ai.onnxtrain": 1]>'


def segments_of(text, draws=()):
    return cut(onnx.parser.parse_model(HEAD + text).SerializeToString(), draws)


def nodes_of(segment):
    return [] if segment.model is None else [n.op_type for n in onnx.load_model_from_string(segment.model).graph.node]


TWO_LAYERS = """g (float[2,4] x, float[4,4] w1, float[4,4] w2) => (float[2,4] y) <float[2,4] a, float[2,4] b> {
    t1 = Transpose(w1)
    a = MatMul(x, t1)
    b = ai.onnxtrain.PythonOp<key: int = 0, output: int = 0>(a)
    t2 = Transpose(w2)
    y = MatMul(b, t2)
}"""


def test_a_value_is_computed_in_the_segment_that_reads_it():
    """Otherwise the transposed weight would be a copy that the first segment makes for the second."""
    first, second = segments_of(TWO_LAYERS)
    assert nodes_of(first) == nodes_of(second) == ["Transpose", "MatMul"]
    assert first.outputs == ["a"] and second.inputs == ["b", "w2"]


SHARED = """g (float[2,4] x) => (float[2,4] y) <float[2,4] e, float[2,4] b> {
    e = Exp(x)
    b = ai.onnxtrain.PythonOp<key: int = 0, output: int = 0>(e)
    n = Neg(e)
    y = Add(b, n)
}"""


def test_a_value_that_a_call_reads_too_is_computed_once():
    first, second = segments_of(SHARED)
    assert nodes_of(first) == ["Exp"] and nodes_of(second) == ["Neg", "Add"]


DRAWS = """g (float[2,4] x) => (float[2,4] y) <float[2,4] h, float[2,1] e, float[2,1] d, float[2,4] k> {
    h = Dropout<seed: int = 1>(x, ratio, training)
    sizes = Constant<value_ints = [2, 1]>()
    z = ConstantOfShape(sizes)
    e = CastLike(z, h)
    d = ai.onnxtrain.PythonOp<key: int = 0, output: int = 0>(e)
    y = Mul(h, d)
}""".replace("(float[2,4] x)", "(float[2,4] x, float ratio, bool training)")


@pytest.mark.parametrize("draws, expected", [((0,), [0, 1]), ((), [1, 0])])
def test_a_draw_waits_for_no_dropout_and_a_function_of_the_user_does(draws, expected):
    assert [nodes_of(segment).count("Dropout") for segment in segments_of(DRAWS, draws)] == expected


def drop_path(x, rate):
    """As timm has it."""
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - rate)
    return x * mask.div_(1 - rate)


class StochasticDepth(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.dropout(drop_path(layer(x).relu(), 0.3))
        return x


def test_stochastic_depth_is_two_segments_with_the_draws_of_eager():
    torch.manual_seed(3)
    module = StochasticDepth().double()
    model = ORTModule(module)
    for batch in (5, 9):
        x = torch.randn(batch, 3, 8, dtype=torch.float64)
        found = []
        for each in (module, model):
            torch.manual_seed(batch)
            result = each(x)
            result.sum().backward()
            found.append([result.detach(), *(p.grad for p in module.parameters()), torch.rand(2)])
            module.zero_grad()
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert "(aten::bernoulli.p) between 2 parts" in onnxtrain.explain(model)


def test_dropout_between_draws_makes_no_segment():
    model = ORTModule(StochasticDepth(0.5))
    model(torch.randn(4, 3, 8)).sum().backward()
    assert "(aten::bernoulli.p) between 2 parts" in onnxtrain.explain(model)
