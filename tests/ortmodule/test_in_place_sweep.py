"""A part of in_place.py, writes in place against eager: another part for each tree."""

import os
import subprocess
import sys
from pathlib import Path

from seeds import of_tree

PARTS = 384  # of about 40 cases each


def test_writes_in_place_are_eagers_or_refused():
    part = int(os.environ.get("ONNXTRAIN_TEST_SAMPLE", of_tree())) % PARTS
    command = [sys.executable, Path(__file__).with_name("in_place.py"), "--part", f"{part}/{PARTS}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0 and " 0 different; " in done.stdout, f"{command}\n{done.stdout}\n{done.stderr[-2000:]}"
