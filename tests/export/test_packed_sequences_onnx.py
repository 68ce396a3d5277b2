"""The ONNX graph of packed sequences: what is packed, run and padded again stays padded."""

from __future__ import annotations

import collections

import onnx
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from onnxtrain.ortmodule import DebugOptions, ORTModule


class Chain(nn.Module):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.GRU(4, 5, 2, bidirectional=True), between, nn.LSTM(10, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed, _ = self.first(pack_padded_sequence(x, lengths))
        packed, _ = self.second(packed._replace(data=self.between(packed.data)))
        return pad_packed_sequence(packed)[0]


def counts(between: nn.Module, path) -> collections.Counter[str]:
    model = ORTModule(Chain(between), DebugOptions(save_onnx=True, onnx_prefix=str(path / "packed")))
    model(torch.randn(7, 3, 4), torch.tensor([7, 4, 1])).sum().backward()
    saved, = path.glob("packed_torch_exported*.onnx")
    return collections.Counter(node.op_type for node in onnx.load(saved).graph.node)


def test_a_chain_stays_padded(tmp_path):
    found = counts(nn.Identity(), tmp_path)
    assert (found["GRU"], found["LSTM"]) == (2, 1)
    assert found["NonZero"] == found["CumSum"] == 0  # nothing is packed, and nothing padded by an index


def test_what_reads_the_data_has_them_packed(tmp_path):
    found = counts(nn.Linear(10, 10), tmp_path)
    assert found["NonZero"] == found["CumSum"] == 1
