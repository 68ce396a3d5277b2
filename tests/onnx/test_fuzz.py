"""A short run of fuzz.py with a seed of the day's own, printed; the long one is run by hand."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fuzz  # noqa: E402


@pytest.mark.parametrize("target", ["core", "loader"])
def test_fuzz(target, tmp_path):
    seed = int(os.environ.get("ONNXTRAIN_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    print(f"ONNXTRAIN_FUZZ_SEED={seed}")
    counts, failures = fuzz.fuzz(target, seed, range(1500), tmp_path)
    assert not failures, "\n".join(failures)
    assert counts["OK"] > 50 and counts["EINVAL"] > 50, counts
