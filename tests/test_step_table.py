"""The benchmark of steps measures what its table says."""

from __future__ import annotations

import pytest
import step_table


@pytest.mark.parametrize("peer", ["eager", "onnxtrain"])
def test_memory_of_a_step_has_no_export_in_it(peer):
    """An export of the MLP takes some 100 MiB; its steps take about 10 in eager PyTorch and 20 in the engine."""
    memory = step_table.peak_memory(step_table.FLOAT32[0], peer, threads=1)
    assert 1 < memory < 50
