"""Models with more threads than cores, in numbers that change (thread_models.py), in a process that may die of it."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_models():
    done = subprocess.run([sys.executable, str(HERE / "thread_models.py")], capture_output=True, text=True, timeout=600)
    last = (done.stdout.splitlines() or ["nothing"])[-1]
    assert done.returncode == 0, f"exit {done.returncode} with {last}\n{done.stderr[-2000:]}"
