"""The one seed of a run: ONNXTRAIN_TEST_SEED. conftest.py draws it where it is not set, and prints it after a failure."""

from __future__ import annotations

import os
import random

SEED = "ONNXTRAIN_TEST_SEED"
DRAWN = "ONNXTRAIN_TEST_DRAWN"  # the seed that conftest.py drew, for workers and child processes
FIXED = 20


def drawn_seed() -> int:
    """ONNXTRAIN_TEST_SEED, else the number that this run has drawn: each run sees other cases."""
    return int(os.environ.get(SEED) or os.environ.setdefault(DRAWN, str(random.randrange(2**31))))


def fixed_seed() -> int:
    """ONNXTRAIN_TEST_SEED, else 20: for samples whose cases must stay the same from run to run."""
    return int(os.environ.get(SEED) or FIXED)
