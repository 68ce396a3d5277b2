"""A short run of fuzz.py with a seed of its own, printed; ONNXTRAIN_SLOW=1 makes it 10,000 mutants of each target."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fuzz  # noqa: E402

COUNT = 10000 if os.environ.get("ONNXTRAIN_SLOW") == "1" else 1500


@pytest.mark.parametrize("target", ["core", "loader"])
def test_fuzz(target, tmp_path, capsys):
    seed = int(os.environ.get("ONNXTRAIN_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    with capsys.disabled():
        print(f"fuzz of the {target}: {COUNT} mutants, ONNXTRAIN_FUZZ_SEED={seed}")
    counts, failures = fuzz.fuzz(target, seed, range(COUNT), tmp_path)
    assert not failures, "\n".join(failures)
    assert counts["OK"] > 50 and counts["EINVAL"] > 50, counts
