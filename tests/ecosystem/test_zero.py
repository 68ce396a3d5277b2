"""DeepSpeed's ZeRO 1 and 2 around a wrapped module: two processes over gloo, losses,
norms and weights equal to eager's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """By process: (stage, dtype) to what the plain run saw, what the wrapped one saw, and its counts."""
    out = tmp_path_factory.mktemp("zero") / "out"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
    workers = [subprocess.Popen([sys.executable, str(HERE / "zero_engine.py"), str(out)],
                                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True) for rank in range(2)]
    try:
        texts = [worker.communicate(timeout=600)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, text in zip(workers, texts):
        assert worker.returncode == 0, text[-3000:]
    return [torch.load(f"{out}.{rank}") for rank in range(2)]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_same_training(results, stage, kind):
    loose = kind == "bf16"
    for process in results:
        plain, ours, counts = process[stage, kind]
        assert counts["fallback_steps"] == 0 and counts["engine_steps"] == len(ours["losses"]) == 10, counts
        assert ours["losses"] == pytest.approx(plain["losses"], rel=5e-2 if loose else 1e-4)
        assert ours["norms"] == pytest.approx(plain["norms"], rel=0.1 if loose else 1e-3) and min(ours["norms"]) > 0
        for a, b in zip(ours["weights"], plain["weights"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-2 if loose else 1e-4)
        assert ours["restored"]
    first, second = (process[stage, kind][1]["weights"] for process in results)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "processes differ"
