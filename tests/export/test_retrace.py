"""What torch.onnx need not trace a second time: the graph is the same, and whatever is not plain goes the long way."""

import contextlib

import onnx
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain.export
from onnxtrain._export import retrace


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.words = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens, targets):
        x = self.words(tokens)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).split(16, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = F.dropout(F.gelu(x), 0.1, self.training) * 2 + tokens.unsqueeze(-1)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


class Branching(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


class InPlace(nn.Module):
    def forward(self, x):
        y = x.clone()
        y[0] = 1.0
        return y.mul_(x)


class NoGrad(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x.exp()
        return x * y


TOKENS = torch.randint(0, 11, (3, 5))
X = torch.randn(3, 4)
CASES = {  # (module, arguments, decompositions are left out, so is promotion)
    "block": (Block, (TOKENS, TOKENS), True, False),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)),
                     (torch.randn(2, 3, 8, 8),), True, True),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (torch.randn(2, 5, 16),), None, None),
    "integers and floats": (lambda: type("Mixed", (nn.Module,), {"forward": lambda self, x, n: (x / 2 + n) * (n > 3)})(),
                            (X, torch.arange(4)), True, False),
    "mutated buffer": (Counting, (X,), False, None),
    "branch": (Branching, (X,), False, False),
    "in place": (InPlace, (X,), False, None),
    "no grad": (NoGrad, (X,), False, None),
    "double": (lambda: nn.Linear(4, 4).double(), (X.double(),), True, True),
}


def exported(make, args):
    torch.manual_seed(0)
    return onnx.load_model_from_string(onnxtrain.export.export(make(), args, {}, training=True).model)


def structure(graph):
    """Nodes with what they read, by position, and their attributes; names apart."""
    places = {value.name: ("input", value.name) for value in graph.input}
    places |= {tensor.name: ("constant", onnx.numpy_helper.to_array(tensor).tobytes()) for tensor in graph.initializer}
    rows = []
    for index, node in enumerate(graph.node):
        attributes = {a.name: structure(a.g) if a.HasField("g") else a.SerializeToString() for a in node.attribute}
        rows.append((node.domain, node.op_type, [places.get(name, ("outer", "")) if name else None for name in node.input], attributes))
        if node.op_type == "Constant":
            places[node.output[0]] = ("constant", node.attribute[0].t.raw_data or node.attribute[0].SerializeToString())
            continue
        places |= {name: (index, k) for k, name in enumerate(node.output)}
    return rows, [places[value.name] for value in graph.output]


@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_the_same(name, monkeypatch):
    make, args, final, promoted = CASES[name]
    seen = {}
    for question in ("is_final", "is_promoted"):
        asked = getattr(retrace, question)
        monkeypatch.setattr(retrace, question, lambda *a, q=question, f=asked: seen.setdefault(q, f(*a)))
    spared = exported(make, args)
    for question, expected in (("is_final", final), ("is_promoted", promoted)):
        assert expected is None or seen[question] is expected, question
    monkeypatch.setattr(retrace, "spared", contextlib.nullcontext)
    retraced = exported(make, args)
    assert [value.name for value in spared.graph.input] == [value.name for value in retraced.graph.input]
    assert structure(spared.graph) == structure(retraced.graph)


def test_another_torch_goes_the_long_way(monkeypatch):
    from torch.onnx._internal.exporter import _fx_passes

    monkeypatch.delattr(_fx_passes, "insert_type_promotion_nodes")
    with retrace.spared():
        assert not hasattr(_fx_passes, "insert_type_promotion_nodes")
