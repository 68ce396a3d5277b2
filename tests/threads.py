"""Whole suites with many threads, by hand: python tests/threads.py [--counts 1,3,4,7,16] [arguments of pytest].

Operators and their gradients, optimizers and DistributedDataParallel at each number, more than there are cores too;
models with all of them in turn, another one for each forward and each backward. A run of 16 threads on two cores takes
its time; tests/ops/test_op_threads.py and tests/ortmodule/test_model_threads.py are the sample that always runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
OPERATORS = ("gradient_sweep", "broadcast", "strided", "attention", "rotary", "rmsnorm", "conv", "depthwise")
SUITES = [*(f"ops/test_{name}.py" for name in OPERATORS), "optim", "ortmodule/test_distributed.py"]
IN_TURN = ["models/test_models.py"]


def run(counts: str, suite: str, arguments: list[str]) -> int:
    """Exit status of pytest. torch takes its number of threads from OpenMP's variable, tests/optim from ours, and models
    take turns.
    """
    env = dict(os.environ)
    if "," in counts:
        env["ONNXTRAIN_TEST_TURNS"] = counts
    else:
        env.update(OMP_NUM_THREADS=counts, ONNXTRAIN_TEST_THREADS=counts)
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--full", str(TESTS / suite), *arguments], env=env,
                          capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [done.stderr[-300:]])[-1]
    print(f"{counts:>12} threads  {suite:32} {time.monotonic() - start:6.0f} s  exit {done.returncode}  {last}", flush=True)
    if done.returncode:
        print(done.stdout[-5000:], done.stderr[-2000:], sep="\n", flush=True)
    return done.returncode


def main(arguments: list[str]) -> int:
    counts = "1,16,3,7,4"
    if arguments[:1] == ["--counts"]:
        counts, arguments = arguments[1], arguments[2:]
    statuses = [run(count, suite, arguments) for count in counts.split(",") for suite in SUITES]
    statuses += [run(counts, suite, arguments) for suite in IN_TURN]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
