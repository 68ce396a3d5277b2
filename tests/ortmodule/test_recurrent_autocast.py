"""Recurrent layers under autocast, padded and packed: one export for all lengths, and eager's results and types."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Tagger(nn.Module):
    """Embeds, runs recurrent layers, scores."""

    def __init__(self, kind, packed, states):
        super().__init__()
        self.embedding, self.packed, self.states = nn.Linear(3, 8), packed, states
        self.layer = kind(8, 6, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, 4)

    def forward(self, x, lengths):
        x, given = self.embedding(x), None
        if self.states:
            given = x.new_zeros(4, x.size(0), 6) + 0.25
            given = (given, given * 2) if isinstance(self.layer, nn.LSTM) else given
        if self.packed:
            x = pack_padded_sequence(x, lengths, True, False)
        x, last = self.layer(x, given)
        if self.packed:
            x, _ = pad_packed_sequence(x, True)
        return self.out(x), last[0] if isinstance(last, tuple) else last


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_lengths_of_one_export(kind, packed, states):
    torch.manual_seed(0)
    eager = Tagger(kind, packed, states)
    model = ORTModule(copy.deepcopy(eager))
    for steps in (5, 7, 6):
        x, lengths, found = torch.randn(4, steps, 3), torch.tensor([steps, 2, steps - 1, 3]), []
        for module in (model, eager):
            module.zero_grad()
            given = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                scores, last = module(given, lengths)
            (scores.float().square().mean() + last.float().square().mean()).backward()
            found.append([scores, last, given.grad, *(p.grad for p in module.parameters())])
        for got, want in zip(*found, strict=True):
            assert got.dtype == want.dtype
            scale = want.abs().max().item()
            torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.03 * scale)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["graph_breaks"]) == (3, 0, []), counts["reasons"]
    assert counts["exports"] <= 2


def test_float64_stays():
    layer = nn.LSTM(3, 4).double()
    model, x = ORTModule(copy.deepcopy(layer)), torch.randn(5, 2, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x)[0], layer(x)[0]
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)
