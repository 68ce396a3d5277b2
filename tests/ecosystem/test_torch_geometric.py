"""torch_geometric: nodes and graphs of ever other sizes classified, by one export of each model, equal to eager."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

geometric = pytest.importorskip("torch_geometric")
from torch_geometric import nn as gnn  # noqa: E402
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402

import onnxtrain  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

FEATURES, CLASSES = 8, 4


class Nodes(nn.Module):
    """Two layers of messages along edges."""

    def __init__(self, layer, **options):
        super().__init__()
        self.first, self.second = layer(FEATURES, 16, **options), layer(16, CLASSES, **options)

    def forward(self, x, edge_index):
        return self.second(F.relu(self.first(x, edge_index)), edge_index)


class Graphs(nn.Module):
    """Graphs of a batch, whose number stands nowhere but in `batch`, pooled in three ways."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = gnn.GCNConv(FEATURES, 16), gnn.BatchNorm(16)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x, edge_index, batch):
        x = F.relu(self.norm(self.layer(x, edge_index)))
        pools = (gnn.global_mean_pool, gnn.global_add_pool, gnn.global_max_pool)
        return self.head(torch.cat([pool(x, batch) for pool in pools], 1))


def isomorphism(n, m):
    return gnn.GINConv(nn.Sequential(nn.Linear(n, 16), nn.ReLU(), nn.Linear(16, m)), train_eps=True)


def graph(nodes, edges, seed):
    """Edges between random nodes; classes of the nodes, and one of the whole."""
    generator = torch.Generator().manual_seed(seed)
    return Data(x=torch.randn(nodes, FEATURES, generator=generator),
                edge_index=torch.randint(0, nodes, (2, edges), generator=generator),
                kinds=torch.randint(0, CLASSES, (nodes,), generator=generator),
                y=torch.randint(0, CLASSES, (1,), generator=generator))


def check(plain, calls):
    """Steps with each (arguments, classes): losses and gradients as eager's, by one export."""
    wrapped = ORTModule(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (plain, wrapped)]
    for arguments, classes in calls:
        losses = []
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
            losses.append(F.cross_entropy(model(*arguments), classes))
            optimizer.zero_grad()
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for (name, a), b in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    counts = onnxtrain.stats(wrapped)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (len(calls), 0, 1), counts
    return wrapped


LAYERS = {"gcn": (gnn.GCNConv, {}), "gat": (gnn.GATConv, {}), "sage": (gnn.SAGEConv, {"aggr": "max"}),
          "gin": (isomorphism, {})}


@pytest.mark.parametrize("kind", LAYERS)
def test_nodes(kind):
    torch.manual_seed(0)
    layer, options = LAYERS[kind]
    sizes = [(20, 60), (33, 90), (11, 25), (20, 61), (50, 200)]
    graphs = [graph(nodes, edges, seed) for seed, (nodes, edges) in enumerate(sizes)]
    check(Nodes(layer, **options), [((g.x, g.edge_index), g.kinds) for g in graphs])


def test_graphs():
    torch.manual_seed(0)
    graphs = [graph(5 + i % 7, 12 + i, i) for i in range(16)]
    batches = list(DataLoader(graphs[:15], batch_size=6)) + list(DataLoader(graphs[:1], batch_size=1))
    wrapped = check(Graphs(), [((b.x, b.edge_index, b.batch), b.y) for b in batches])
    wrapped.eval()
    batch = batches[0]
    with torch.no_grad():
        torch.testing.assert_close(wrapped(batch.x, batch.edge_index, batch.batch),
                                   wrapped.module(batch.x, batch.edge_index, batch.batch), rtol=1e-4, atol=1e-5)
    assert onnxtrain.stats(wrapped)["engine_steps"] == len(batches) + 1


def test_a_model_of_the_library_with_scatter():
    """torch_geometric.nn's own GCN with jumping knowledge, and a scatter of its results."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = gnn.models.GCN(FEATURES, 12, 2, CLASSES, jk="cat", norm="layer_norm")

        def forward(self, x, edge_index, cluster):
            y = self.body(x, edge_index)
            return torch.stack([geometric.utils.scatter(y, cluster, 0, reduce=how) for how in ("sum", "mean", "max")])

    torch.manual_seed(0)
    calls = []
    for seed, nodes in enumerate((9, 14, 14)):
        g, cluster = graph(nodes, 3 * nodes, seed), torch.arange(nodes) % (3 + seed)
        calls.append(((g.x, g.edge_index, cluster), torch.softmax(torch.randn(3, 3 + seed, CLASSES), 1)))
    check(Sums(), calls)
