"""The first step of GPT-2 124M in a fresh process, eager against ours with a warm ORTMODULE_CACHE_DIR: python tests/bench/start.py

Each figure is from the first call of the model to its loss and gradients, imports and construction apart; medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROUNDS = int(os.environ.get("ROUNDS", "5"))
BATCH, LENGTH = 1, 128


def once(kind: str) -> None:
    """One process: prints the seconds of the first and the second step."""
    import torch

    import onnxtrain
    from onnxtrain.ortmodule import ORTModule

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from workloads import GPT2

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    module = GPT2()
    tokens = torch.randint(0, 50257, (BATCH, LENGTH))
    torch.ones(8, 8).requires_grad_(True).mm(torch.ones(8, 8)).sum().backward()  # torch's own start
    start = time.perf_counter()
    model = module if kind == "eager" else ORTModule(module)
    seconds = []
    for _ in range(2):
        loss = model(tokens, tokens)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    counts = onnxtrain.stats()
    print(*seconds, counts["exports"], counts["cached_exports"], float(loss.detach()))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ORTMODULE_CACHE_DIR": folder}

        def run(kind: str) -> list[float]:
            done = subprocess.run([sys.executable, "-W", "ignore", __file__, kind], env=environment, capture_output=True, text=True, check=True)
            return [float(word) for word in done.stdout.split()[-5:]]

        cold = run("ours")
        print(f"ours, nothing kept: {cold[0]:.2f} s")
        times: dict[str, list[float]] = {"eager": [], "ours": []}
        for _ in range(ROUNDS):
            for kind, own in times.items():
                first, second, exports, cached, loss = run(kind)
                assert abs(loss - cold[4]) < 1e-3 and (kind == "eager" or (exports, cached) == (0, 1)), (exports, cached, loss)
                own.append(first)
                print(f"{kind:>6}: first step {first:.2f} s, second {second:.2f} s")
        eager, ours = (statistics.median(own) for own in times.values())
        print(f"median: eager {eager:.2f} s, ours from the cache {ours:.2f} s, above it {ours - eager:.2f} s (goal 0.50)")


if __name__ == "__main__":
    once(sys.argv[1]) if len(sys.argv) > 1 else main()
