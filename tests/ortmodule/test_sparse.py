"""Sparse tensors in forward: PyTorch computes with them, and the engine runs what is around."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from agree import trained

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def adjacency(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return ((torch.rand(6, 6, generator=generator) < 0.4) * torch.rand(6, 6, generator=generator)).to_sparse()


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.norm, self.last, self.use = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3), use
        self.register_buffer("adjacency", adjacency())

    def forward(self, *args):
        return self.use(self, *args)


def stats(use, calls):
    torch.manual_seed(0)
    return trained(Net(use), calls)


def of_an_argument(m, x, adjacency):
    return torch.sparse.mm(adjacency, m.last(m.norm(torch.spmm(adjacency, m.first(x))).relu()))


def of_a_buffer(m, x):
    return m.last(m.norm(m.adjacency @ m.first(x)).relu())


def in_a_dict(m, x, given):
    return m.last(given["adjacency"].t().matmul(m.norm(m.first(x))))


def attributes(m, x, adjacency):
    weight = adjacency.shape[0] / adjacency._nnz() if adjacency.is_sparse else 1.0
    return m.last(m.norm(m.first(x)) * weight)


def in_parts(counts, calls_a_method):
    """Where forward calls a method of a sparse tensor, torch 2.15 leaves all of it to PyTorch, which is named."""
    if calls_a_method and torch.__version__ >= (2, 15):
        assert counts["fallback_steps"] == 6
        assert f"PyTorch computes with a sparse tensor, in {__file__}, line " in counts["reasons"][0]
    else:
        assert (counts["engine_steps"], counts["fallback_steps"], counts["reasons"]) == (6, 0, [])


@pytest.mark.parametrize("use, given", [
    (of_an_argument, adjacency), (of_an_argument, lambda seed: adjacency(seed).to_sparse_csr()), (of_a_buffer, None),
    (in_a_dict, lambda seed: {"adjacency": adjacency(seed)}), (attributes, adjacency)],
    ids=["coo", "csr", "buffer", "dict", "attributes"])
def test_a_graph_network(use, given):
    counts = stats(use, [(x,) if given is None else (x, given(i % 3)) for i, x in enumerate(X)])
    in_parts(counts, use in (in_a_dict, attributes))
    assert counts["graph_breaks"] and all(__file__ in cut for cut in counts["graph_breaks"])
    assert any(cut.startswith("PyTorch computes with a sparse tensor, in ") for cut in counts["graph_breaks"])


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, self.fc(x)).relu()


def test_layers_in_a_loop():
    """PyTorch runs the function with the loop, and the engine the layers."""
    def deep(m, x, adjacency):
        x = m.first(x)
        for layer in m.layers:
            x = layer(x, adjacency)
        return m.last(x)

    class Deep(Net):
        def __init__(self, use):
            super().__init__(use)
            self.layers = nn.ModuleList(Convolution() for _ in range(3))

    torch.manual_seed(0)
    eager = Deep(deep)
    model = ORTModule(copy.deepcopy(eager))
    for i, x in enumerate(X):
        torch.testing.assert_close(model(x, adjacency(i)), eager(x, adjacency(i)))
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (6, 0)
    assert any("torch.sparse.mm(adjacency, self.fc(x))" in cut for cut in counts["graph_breaks"])


def optional(m, x, adjacency):
    h = m.norm(m.first(x))
    if adjacency is not None:
        h = adjacency @ h
    elif isinstance(adjacency, torch.Tensor) and adjacency.is_sparse:
        h = h * 3
    return m.last(h)


def test_an_argument_that_is_sparse_or_not():
    kinds = adjacency(), adjacency().to_dense(), None
    for start in range(3):
        torch._dynamo.reset()
        counts = stats(optional, [(x, kinds[(start + i) % 3]) for i, x in enumerate(X)])
        assert (counts["engine_steps"], counts["fallback_steps"]) == (6, 0)


def made(m, x, indices, values):
    weights = m.last(m.first(values[:, None].expand(-1, 4)))[:, 0].sigmoid()
    whole = torch.sparse_coo_tensor(indices, weights, (x.size(0), x.size(0)))
    return m.last(torch.sparse.mm(whole, m.norm(m.first(x))))


def taken_apart(m, x, whole):
    whole = whole.coalesce()
    (rows, columns), values = whole.indices(), whole.values()
    h = m.norm(m.first(x))
    return m.last(torch.zeros_like(h).index_add(0, rows, h[columns] * values[:, None]))


@pytest.mark.parametrize("own", [False, True])
def test_a_sparse_tensor_made_in_forward(own):
    """Also of the indices and values of a sparse tensor, which are dense views of it."""
    parts = [(a.indices(), a.values()) for a in map(torch.Tensor.coalesce, map(adjacency, range(6)))]
    counts = stats(made, [(x, i, v) if own else (x, i.clone(), v.clone()) for x, (i, v) in zip(X, parts, strict=True)])
    in_parts(counts, own)
    assert counts["fallback_steps"] or any("torch.sparse_coo_tensor(indices, weights" in cut for cut in counts["graph_breaks"])


def test_indices_and_values():
    in_parts(stats(taken_apart, [(x, adjacency(i)) for i, x in enumerate(X)]), True)


def test_a_sparse_tensor_that_is_kept_and_returned():
    def keep(m, x, given):
        m.kept = given
        return m.last(m.norm(m.first(x))), given

    model, given = ORTModule(Net(keep)), adjacency()
    assert model(X[0], given)[1] is given and model.kept is given
    assert onnxtrain.stats(model)["engine_steps"] == 1


def test_no_part_can_be_captured():
    """The cut is inside `try`: the reason has the line."""
    def tried(m, x, given):
        try:
            return m.last(given @ m.first(x))
        except ValueError:
            return x

    counts = stats(tried, [(x, adjacency()) for x in X[:2]])
    assert (counts["engine_steps"], counts["fallback_steps"]) == (0, 2)
    assert "sparse tensor, in " in counts["reasons"][0] and "m.last(given @ m.first(x))" in counts["reasons"][0]
