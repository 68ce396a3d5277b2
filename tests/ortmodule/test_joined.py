"""Joined, picked and squeezed tensors whose dtypes, shapes and indices torch.onnx does not take: eager's results."""

import pytest
import torch
import torch.nn.functional as F
from agree import both, in_engine, module, step

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
WHOLE = torch.tensor([[1, 0, 3, 2], [0, -1, 2, 2], [3, 1, -1, 0]])


def stored(m, x, labels, where, accumulate=False):
    made = torch.zeros(3, 4, 4)
    return made.index_put(where(labels), m.fc(x).sum(), accumulate=accumulate)


def written(m, x, labels):
    made, first = torch.zeros(3, 4) + m.fc(x), labels[:, 0] > 0
    made[first, labels[first, 0]] = 2 * x[0, 0]
    return made


FORWARDS = {
    "float beside whole numbers": lambda m, x, n: torch.cat([m.fc(x), n], 1),
    "nothing beside something": lambda m, x, n: torch.cat([torch.tensor([]), m.fc(x), torch.empty(0)]),
    "nothing alone": lambda m, x, n: m.fc(x) + torch.cat([torch.tensor([]), torch.tensor([])]).sum(),
    "columns": lambda m, x, n: torch.column_stack([m.fc(x), n[:, 0], F.one_hot(n[:, 2].clamp(0), 4)]),
    "rows": lambda m, x, n: torch.vstack([m.fc(x), n]) + torch.hstack([x[0], n[0]]).sum(),
    "depth": lambda m, x, n: torch.dstack([m.fc(x), n]),
    "squeezed where nothing is to squeeze": lambda m, x, n: m.fc(x).squeeze(1).squeeze(0) + m.fc(x)[:1].squeeze(0),
    "squeezed along some": lambda m, x, n: m.fc(x)[:, None, :, None].squeeze((1, 2)),
    "largest of all": lambda m, x, n: m.fc(x).amax() + m.fc(x).amin() + n.amax() * n.amin(),
    "largest, kept": lambda m, x, n: m.fc(x).amax(keepdim=True) + m.fc(x).amin((0, 1), True),
    "stored at a mask and an index": written,
    "stored at a plane's mask and an index": lambda m, x, n: stored(
        m, x, n, lambda n: (n > 0, torch.full((int(n.shape[0]) + 2,), 2)[:1])),
    "added at an index and a mask": lambda m, x, n: stored(m, x, n, lambda n: (torch.tensor(1), n[0] > 0), True),
    "indices of two dtypes": lambda m, x, n: m.fc(x)[torch.tensor([[0], [2]], dtype=torch.int32), torch.arange(4)],
    "losses at a mask": lambda m, x, n: F.cross_entropy(m.fc(x), n[:, 0], reduction="none")[n[:, 0] > 0],
    "losses as a plane": lambda m, x, n: F.cross_entropy(
        m.fc(x).view(-1, 2), (n > 0).long().view(-1)[:6], reduction="none").view(2, 3),
    "a size out of a region without gradients": lambda m, x, n: sized(m, x),
    "whole numbers drawn in a dtype": lambda m, x, n: m.fc(x) * torch.randint_like(x > 0, 0, 5, dtype=torch.int32),
}


def sized(m, x):
    y = m.fc(x)
    with torch.no_grad():
        n = min(2, x.size(1))
    return y[:, :n]


@pytest.mark.parametrize("name", FORWARDS)
def test_as_in_eager(name):
    in_engine(both(module(FORWARDS[name]), step(X, WHOLE)))
