"""The kernel that takes one row after the other, and those in tiles, read the statistics of each other."""

from __future__ import annotations

import pytest
import torch
from test_flash_native import SEED, TILES, agree, as_it_was, masked  # noqa: F401
from test_fuse_attention import Model, plain_attention


@pytest.mark.parametrize("pair", [(TILES[:1], TILES[1:]), (TILES[1:], TILES[:1]), (TILES, [])],
                         ids=["backward", "forward", "neither"])
def test_statistics_are_those_of_the_other_kernels(pair):
    """A forward in tiles may be followed by a gradient of the reference, and the other way round."""
    torch.manual_seed(SEED)
    m = Model(torch.float32)
    q, k, v = m.random(2, 2, 150, 20), m.random(2, 2, 500, 20), m.random(2, 2, 500, 20)
    y = plain_attention(m, q, k, v, d=20, drop=0.3, **masked(m, 150, 500, "bias"))
    agree(m, y, pair[0], pair[1], threads=2, hint=pair)
