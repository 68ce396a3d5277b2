"""torch.nn's recurrent cells in plain operators. torch's own decomposition of a fused one runs every operator of the
program once more, which takes most of an export where a cell is called at each step of a sequence. Used by rewrite.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def lstm_cell(input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
              b_hh: Tensor | None = None) -> tuple[Tensor, Tensor]:
    hidden, cell = hx
    entry, forget, new, out = (F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)).chunk(4, -1)
    cell = forget.sigmoid() * cell + entry.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def gru_cell(input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
             b_hh: Tensor | None = None) -> Tensor:
    given, held = F.linear(input, w_ih, b_ih).chunk(3, -1), F.linear(hx, w_hh, b_hh).chunk(3, -1)
    reset, update = [(a + b).sigmoid() for a, b in zip(given[:2], held[:2])]
    new = (given[2] + reset * held[2]).tanh()
    return (hx - new) * update + new


def _plain(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
             b_hh: Tensor | None = None) -> Tensor:
        return activation(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    return cell


CELLS: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: lstm_cell, torch.gru_cell: gru_cell, torch.rnn_tanh_cell: _plain(torch.tanh),
    torch.rnn_relu_cell: _plain(torch.relu)}
