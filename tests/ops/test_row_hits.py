"""Sorted indices of rows, which Gather's gradient and SparseMatMul share: every number of digits, in and out of order,
and rows divided among more threads than there are hits.
"""

import numpy as np
import pytest
import torch
from test_gather_grad import expected, gradient

WIDTH = 256  # float32: rows long enough to be sorted


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 65536, 65537])
@pytest.mark.parametrize("order", ["drawn", "rising", "falling"])
def test_digits(rows, order):
    rng = np.random.default_rng(rows)
    index = rng.integers(0, rows, 400)
    index = {"drawn": index, "rising": np.sort(index), "falling": np.sort(index)[::-1].copy()}[order]
    index[0 if order == "falling" else -1] = rows - 1
    dy = torch.from_numpy(rng.normal(size=(400, WIDTH)).astype(np.float32))
    got = gradient(torch.zeros(rows, WIDTH), torch.from_numpy(index), dy)
    assert torch.equal(got, expected((rows, WIDTH), torch.from_numpy(index), dy))


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("hits", [1, 2, 15, 1000])
def test_rows_are_divided_by_their_hits(threads, hits):
    """Rows before, between and behind the hits are written too."""
    rng = np.random.default_rng(hits)
    index = torch.from_numpy(np.minimum(rng.zipf(1.5, hits), 3000) + 500)
    dy = torch.from_numpy(rng.normal(size=(hits, WIDTH)).astype(np.float32))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = gradient(torch.zeros(4000, WIDTH), index, dy)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, expected((4000, WIDTH), index, dy))
