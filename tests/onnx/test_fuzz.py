"""A short run of fuzz.py with a seed of its own, printed; ONNXTRAIN_SLOW=1 makes it 10,000 mutants of each target."""

from __future__ import annotations

import os

import fuzz
import pytest
from seeds import drawn_seed

COUNT = 10000 if os.environ.get("ONNXTRAIN_SLOW") == "1" else 1500


@pytest.mark.parametrize("target", ["core", "loader"])
def test_fuzz(target, tmp_path, capsys):
    seed = drawn_seed()
    with capsys.disabled():
        print(f"fuzz of the {target}: {COUNT} mutants, ONNXTRAIN_TEST_SEED={seed}")
    counts, failures = fuzz.fuzz(target, seed, range(COUNT), tmp_path)
    assert not failures, "\n".join(failures)
    assert counts["OK"] > 50 and counts["EINVAL"] > 50, counts
