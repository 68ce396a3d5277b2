"""Networks on graphs."""

import sys

import torch
import torch.nn.functional as F
from scripts import Run, script
from torch import nn, optim

PYG = "torch_geometric==2.8.1"


def one_graph(nodes=40, features=12, edges=120):
    """Features and edges."""
    return torch.rand(nodes, features), torch.randint(0, nodes, (2, edges))


@script("tkipf/pygcn@1600b5b748b3976413d1e307540ccc62605b4d6d", requires=("scipy",))
def pygcn(run: Run):
    """train.py: the adjacency is a sparse tensor; the script evaluates after each step."""
    sys.path.insert(0, str(run.folder))
    from pygcn.models import GCN
    from pygcn.utils import accuracy

    adjacency = torch.eye(50) + (torch.rand(50, 50) < 0.1).float()
    adjacency = (adjacency / adjacency.sum(1, keepdim=True)).to_sparse()
    features, labels = torch.rand(50, 30), torch.randint(0, 7, (50,))
    train, valid = torch.arange(20), torch.arange(20, 40)
    model = run.wrap(GCN(nfeat=30, nhid=16, nclass=7, dropout=0.0))
    optimizer = optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(run.steps):
        model.train()
        optimizer.zero_grad()
        output = model(features, adjacency)
        loss = F.nll_loss(output[train], labels[train])
        accuracy(output[train], labels[train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy(model(features, adjacency)[valid], labels[valid])
        run.step(loss)


def classify_nodes(run: Run, model):
    """One graph, as the library's examples/gcn.py."""
    model = run.wrap(model)
    x, edge_index = one_graph()
    y, mask = torch.randint(0, 4, (40,)), torch.rand(40) < 0.5
    optimizer = optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(run.steps):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index)[mask], y[mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x, edge_index).argmax(dim=-1)
        run.step(loss)


@script(PYG)
def pyg_gcn(run: Run):
    from torch_geometric.nn.models import GCN

    classify_nodes(run, GCN(12, 16, 2, 4))


@script(PYG)
def pyg_gat(run: Run):
    from torch_geometric.nn.models import GAT

    classify_nodes(run, GAT(12, 16, 2, 4, heads=4, v2=True))


@script(PYG)
def pyg_gin_graphs(run: Run):
    """Batches of graphs of changing sizes from the library's loader, pooled, as examples/mutag_gin.py."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import MLP, GINConv, global_add_pool

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(GINConv(MLP([width, 16, 16]), train_eps=False) for width in (12, 16))
            self.mlp = MLP([16, 16, 2], norm=None)

        def forward(self, x, edge_index, batch, batch_size):
            for conv in self.convs:
                x = conv(x, edge_index).relu()
            return self.mlp(global_add_pool(x, batch, size=batch_size))

    model = run.wrap(Net())
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    graphs = []
    for i in range(8 * run.steps - 3):
        x, edge_index = one_graph(5 + i % 7, 12, 14 + i % 5)
        graphs.append(Data(x=x, edge_index=edge_index, y=torch.randint(0, 2, (1,))))
    for data in DataLoader(graphs, batch_size=8):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.batch, data.batch_size)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        run.step(loss)


@script(PYG, line='model = ORTModule(model, methods=("encode", "recon_loss"))')
def pyg_vgae(run: Run):
    """A variational autoencoder of a graph, by its methods encode, recon_loss and kl_loss."""
    from torch_geometric.nn import VGAE, GCNConv

    class Encoder(nn.Module):  # as in examples/autoencoder.py
        def __init__(self):
            super().__init__()
            self.conv1, self.conv_mu, self.conv_logstd = GCNConv(12, 16), GCNConv(16, 8), GCNConv(16, 8)

        def forward(self, x, edge_index):
            x = self.conv1(x, edge_index).relu()
            return self.conv_mu(x, edge_index), self.conv_logstd(x, edge_index)

    model = run.wrap(VGAE(Encoder()), methods=("encode", "recon_loss"))
    x, edge_index = one_graph()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    for _ in range(run.steps):
        model.train()
        optimizer.zero_grad()
        z = model.encode(x, edge_index)
        loss = model.recon_loss(z, edge_index, torch.randint(0, 40, edge_index.shape))
        loss = loss + (1 / 40) * model.kl_loss()
        loss.backward()
        optimizer.step()
        run.step(loss)


@script(PYG)
def pyg_schnet(run: Run):
    """Energies of molecules; the graph of neighbours is of this driver, since the library's needs a compiled package."""
    from torch_geometric.nn.models import SchNet

    def neighbours(pos, batch):
        near = (pos[:, None] - pos).square().sum(-1) < 25.0
        near = near & (batch[:, None] == batch) & ~torch.eye(len(pos), dtype=torch.bool)
        row, col = near.nonzero().unbind(1)
        return torch.stack([row, col]), (pos[row] - pos[col]).norm(dim=-1)

    model = run.wrap(SchNet(hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, cutoff=5.0,
                            interaction_graph=neighbours))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for i in range(run.steps):
        batch = torch.arange(4).repeat_interleave(5 + i % 3)
        loss = F.mse_loss(model(torch.randint(1, 9, batch.shape), torch.randn(len(batch), 3) * 2, batch), torch.randn(4, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("pykeen==1.11.1", line='model = ORTModule(model, methods=("score_hrt",))')
def pykeen_rotate(run: Run):
    """RotatE, whose embeddings are complex, by pykeen's pipeline's pieces: its loss on triples and corrupted ones."""
    from pykeen.models import RotatE
    from pykeen.triples import CoreTriplesFactory

    triples = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, 4, (200,)), torch.randint(0, 30, (200,))], 1)
    factory = CoreTriplesFactory.create(triples, num_entities=30, num_relations=4)
    model = run.wrap(RotatE(triples_factory=factory, embedding_dim=8, random_seed=0), methods=("score_hrt",))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    for n in run.sizes(32, 20):
        positive = triples[torch.randint(0, 200, (n,))]
        negative = torch.cat((positive[:, :2], torch.randint(0, 30, (n, 1))), 1)
        optimizer.zero_grad()
        loss = model.loss.process_slcwa_scores(model.score_hrt(positive), model.score_hrt(negative))
        loss.backward()
        optimizer.step()
        model.post_parameter_update()
        run.step(loss)
