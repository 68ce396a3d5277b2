"""What is random in a run of the tests: a function of the tree that is tested, so that two runs of one commit, before and
after, do the same. conftest.py prints after a failure what repeats it.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

SEED = "ONNXTRAIN_TEST_SEED"
FIXED = 20


@functools.cache
def of_tree() -> int:
    """A number made of HEAD's tree, whatever is changed or not committed; 20 outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD^{tree}"]
    try:
        tree = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return FIXED
    return int(tree.strip()[-7:], 16)


def drawn_seed() -> int:
    """ONNXTRAIN_TEST_SEED, else the tree's number: each commit sees other cases."""
    return int(os.environ.get(SEED) or of_tree())


def fixed_seed() -> int:
    """ONNXTRAIN_TEST_SEED, else 20: for samples whose cases must stay the same from run to run."""
    return int(os.environ.get(SEED) or FIXED)
