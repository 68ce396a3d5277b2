"""Pages that are made from the code are current."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_operator_table_is_current():
    done = subprocess.run([sys.executable, "-W", "ignore", ROOT / "tools" / "operators.py", "--check"], capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))})
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
