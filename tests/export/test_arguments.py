"""Indices and sizes of windows that torch.onnx would take in its own way are taken, or refused, as in eager."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from test_agreement import SCORES, raised, wrapped
from torch import nn, tensor

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._whole import export_whole

# (function of x and indices, an index that torch refuses; None: it counts from the end)
INDEXED = {
    "embedding": (lambda x, i: F.embedding(i, x), -1),
    "embedding_padded": (lambda x, i: F.embedding(i, x, padding_idx=0), -1),
    "embedding_above": (lambda x, i: F.embedding(i, x), 5),
    "embedding_bag": (lambda x, i: F.embedding_bag(i.unsqueeze(0), x), -1),
    "index_select": (lambda x, i: x.index_select(0, i), -1),
    "gather": (lambda x, i: x.gather(0, i.unsqueeze(1)), -1),
    "scatter": (lambda x, i: x.scatter(0, i.unsqueeze(1), x), -1),
    "scatter_value": (lambda x, i: x.scatter(0, i.unsqueeze(1), 1.5), -1),
    "scatter_add": (lambda x, i: x.scatter_add(0, i.unsqueeze(1), x), -1),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i.unsqueeze(1), x, "amax"), -1),
    "index_add": (lambda x, i: x.index_add(0, i, x[:3]), -1),
    "index_add_in_place": (lambda x, i: (x * 1).index_add_(0, i, x[:3]), -1),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:3]), -1),
    "one_hot": (lambda x, i: x[:3] * F.one_hot(i, 5)[:, :4], -1),
    "one_hot_above": (lambda x, i: x[:3] * F.one_hot(i, 5)[:, :4], 5),
    "index": (lambda x, i: x[i], None),
    "take": (lambda x, i: x.take(i), None),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), None),
}


@pytest.mark.parametrize("name", sorted(INDEXED))
def test_indices(name):
    function, bad = INDEXED[name]
    model, good = wrapped(function), tensor([0, 1, 4])
    x = SCORES.clone().requires_grad_()
    torch.testing.assert_close(model(x, good), function(x, good))
    last = tensor([0, -1 if bad is None else bad, 2])
    if bad is None:
        torch.testing.assert_close(model(x, last), function(x, last))
    else:
        assert raised(model, x, last) == raised(function, x, last)
    assert onnxtrain.stats(model)["engine_steps"] == 1 + (bad is None)


class Means(nn.Module):
    """By sizes known, by one that is the image's, and by a factor of it."""

    def forward(self, x):
        return (F.adaptive_avg_pool2d(x, (5, 3)), F.adaptive_avg_pool2d(x, (None, 4)), F.adaptive_avg_pool2d(x[0], 3),
                F.interpolate(x, scale_factor=2, mode="area"), F.adaptive_avg_pool1d(x[:, :, 0], 3),
                F.adaptive_avg_pool3d(x.unsqueeze(1), (2, 3, 4)))


def test_means_over_parts_of_any_size():
    """One operator each, where the exporter would gather every window."""
    eager = Means()
    model = ORTModule(eager)
    for shape in (2, 3, 7, 11), (3, 3, 13, 6):
        given = torch.randn(shape, requires_grad=True)
        expected = given.detach().clone().requires_grad_()
        ours, theirs = model(given), eager(expected)
        torch.testing.assert_close(ours, theirs)
        weights = [torch.randn_like(y) for y in theirs]
        torch.autograd.backward(ours, weights)
        torch.autograd.backward(theirs, weights)
        torch.testing.assert_close(given.grad, expected.grad)
    assert onnxtrain.stats(model)["fallback_steps"] == 0
    exported = onnx.load_from_string(export_whole(eager, (given,), {}).model)
    assert sum(node.op_type in ("AdaptiveAveragePool", "AveragePool") for node in exported.graph.node) == 6
