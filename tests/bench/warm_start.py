"""The first step of GPT-2 124M in a fresh process, eager against ours with a warm ORTMODULE_CACHE_DIR: python
tests/bench/warm_start.py

Each figure is from the first call of the model to its loss and gradients, imports and construction apart; medians, of
wall clock and of processor time (which a busy machine disturbs less).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

ROUNDS = int(os.environ.get("ROUNDS", "5"))
BATCH, LENGTH = 1, 128


def once(kind: str) -> None:
    """One process: prints the seconds of the first and the second step."""
    import torch
    from workloads import GPT2

    import onnxtrain
    from onnxtrain.ortmodule import ORTModule

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    module = GPT2()
    tokens = torch.randint(0, 50257, (BATCH, LENGTH))
    torch.ones(8, 8).requires_grad_(True).mm(torch.ones(8, 8)).sum().backward()  # torch's own start
    seconds = []
    for step in range(2):
        wall, cpu = time.perf_counter(), time.process_time()
        if not step:
            model = module if kind == "eager" else ORTModule(module)
        loss = model(tokens, tokens)
        loss.backward()
        seconds += [time.perf_counter() - wall, time.process_time() - cpu]
    counts = onnxtrain.stats()
    print(*seconds, counts["exports"], counts["cached_exports"], float(loss.detach()))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ORTMODULE_CACHE_DIR": folder}

        def run(kind: str) -> list[float]:
            done = subprocess.run([sys.executable, "-W", "ignore", __file__, kind], env=environment,
                                  capture_output=True, text=True, check=True)
            return [float(word) for word in done.stdout.split()[-7:]]

        cold = run("ours")
        print(f"ours, nothing kept: {cold[0]:.2f} s")
        times: dict[str, list[tuple[float, float]]] = {"eager": [], "ours": []}
        for _ in range(ROUNDS):
            for kind, own in times.items():
                first, first_cpu, second, second_cpu, exports, cached, loss = run(kind)
                assert (abs(loss - cold[6]) < 1e-3
                        and (kind == "eager" or (exports, cached) == (0, 1))), (exports, cached, loss)
                own.append((first, first_cpu))
                print(f"{kind:>6}: first step {first:.2f} s ({first_cpu:.2f} of the processor), second {second:.2f} s "
                      f"({second_cpu:.2f})")
        for position, what in enumerate(("wall clock", "processor time")):
            eager, ours = (statistics.median(pair[position] for pair in own) for own in times.values())
            print(f"{what}, median: eager {eager:.2f} s, ours from the cache {ours:.2f} s, above it {ours - eager:.2f} "
                  "s (goal 0.50)")


if __name__ == "__main__":
    once(sys.argv[1]) if len(sys.argv) > 1 else main()
