"""Classifies graphs with torch_geometric's GraphSAGE, in PyTorch and with ORTModule: one export for all sizes.

    python train.py                                  # two kinds of random graphs
    python train.py --data FOLDER --name PROTEINS    # a TUDataset, which torch_geometric downloads into the folder
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GraphSAGE, global_mean_pool
from torch_geometric.utils import barabasi_albert_graph, degree, erdos_renyi_graph

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Classifier(nn.Module):
    """Features (nodes, features), edges (2, edges) and the graph of each node (nodes,) to scores (graphs, classes)."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.nodes = GraphSAGE(features, hidden, num_layers=3)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.head(global_mean_pool(self.nodes(x, edge_index), batch))


def drawn(count: int) -> list[Data]:
    """Graphs of 40 to 120 nodes, four edges a node: Erdos and Renyi's (label 0), Barabasi and Albert's (1)."""
    graphs = []
    for _ in range(count):
        nodes, label = int(torch.randint(40, 121, ())), int(torch.randint(2, ()))
        edges = barabasi_albert_graph(nodes, 2) if label else erdos_renyi_graph(nodes, 4 / nodes)
        graphs.append(Data(x=degree(edges[0], nodes).view(-1, 1) / 4, edge_index=edges, y=torch.tensor([label])))
    return graphs


def train(model: nn.Module, graphs: list[Data], args: argparse.Namespace) -> tuple[list[float], float]:
    """The mean loss of each epoch, and the median of the milliseconds that steps took."""
    torch.manual_seed(args.seed)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    losses, times = [], []
    for _ in range(args.epochs):
        total = 0.0
        for batch in DataLoader(graphs, args.batch, shuffle=True):
            start = time.perf_counter()
            loss = nn.functional.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times.append(1e3 * (time.perf_counter() - start))
            total += loss.item() * len(batch.y)
        losses.append(total / len(graphs))
    return losses, sorted(times)[len(times) // 2]


@torch.no_grad()
def accuracy(model: nn.Module, graphs: list[Data]) -> float:
    model.eval()
    right = [(model(batch.x, batch.edge_index, batch.batch).argmax(1) == batch.y).float().sum().item()
             for batch in DataLoader(graphs, 64)]
    return sum(right) / len(graphs)


def main(given: list[str] | None = None) -> tuple[list[float], list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of TUDatasets")
    parser.add_argument("--name", default="PROTEINS", help="of the dataset; its nodes must have features")
    parser.add_argument("--graphs", type=int, default=400, help="that are drawn where there is no --data")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    seed_everything(args.seed)
    if args.data:
        from torch_geometric.datasets import TUDataset

        graphs = list(TUDataset(str(args.data), args.name).shuffle())
    else:
        graphs = drawn(args.graphs)
    cut = len(graphs) * 9 // 10
    classes = 1 + max(int(graph.y) for graph in graphs)
    eager = Classifier(graphs[0].num_features, args.hidden, classes)
    model = ORTModule(copy.deepcopy(eager))
    eager_losses, eager_ms = train(eager, graphs[:cut], args)
    losses, ms = train(model, graphs[:cut], args)
    counts = onnxtrain.stats(model)
    steps = counts["engine_steps"] + counts["fallback_steps"]
    print("epoch    eager  onnxtrain")
    for epoch, (ours, theirs) in enumerate(zip(losses, eager_losses), 1):
        print(f"{epoch:5} {theirs:8.4f}   {ours:8.4f}")
    print(f"{counts['engine_steps']} of {steps} steps ran in the engine, exports: "
          f"{counts['exports'] + counts['cached_exports']}; eager {eager_ms:.2f} ms a step, onnxtrain {ms:.2f} ms "
          f"({eager_ms / ms:.2f}x)")
    print(f"right of the {len(graphs) - cut} graphs left out: eager {accuracy(eager, graphs[cut:]):.0%}, onnxtrain "
          f"{accuracy(model, graphs[cut:]):.0%}")
    return eager_losses, losses


if __name__ == "__main__":
    main()
