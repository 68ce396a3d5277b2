"""FP16_Optimizer over DeepSpeed's ZeRO 1 and 2 as they are, two processes over gloo on the CPU accelerator."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onnxtrain

pytest.importorskip("deepspeed")
HERE = Path(__file__).resolve().parent
BAD = 6


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """By process: (kind, stage, inner, wrapped) to what was seen there."""
    out = tmp_path_factory.mktemp("zero") / "out"
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                   "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join([str(Path(onnxtrain.__file__).parents[1]),
                                                  os.environ.get("PYTHONPATH", "")])}
    workers = [subprocess.Popen([sys.executable, str(HERE / "zero_worker.py"), str(out)],
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


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp16 static"])
@pytest.mark.parametrize("inner", ["torch", "ours"])
def test_same_training(results, kind, stage, inner):
    plain, ours = ([process[kind, stage, inner, wrapped] for process in results] for wrapped in (False, True))
    for a, b in zip(ours, plain):
        for step, (x, y) in enumerate(zip(a["seen"], b["seen"])):
            assert x["scale"] == y["scale"] and x["overflow"] == y["overflow"] and x["changed"] == y["changed"], step
            assert x["norm"] == pytest.approx(y["norm"], rel=1e-3, nan_ok=True), step
            assert x["loss"] == pytest.approx(y["loss"], rel=1e-2, abs=1e-4, nan_ok=True), step
        for p, q in zip(a["masters"], b["masters"]):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(p, q) for p, q in zip(ours[0]["params"], ours[1]["params"])), "processes differ"
    seen = ours[0]["seen"]
    assert seen[BAD]["overflow"] and not seen[BAD]["changed"] and math.isinf(seen[BAD]["norm"])
    assert all(s["changed"] for i, s in enumerate(seen) if not s["overflow"])
    if kind == "fp16":
        assert len({s["scale"] for s in seen}) > 1
    if inner == "ours":
        # two groups a step, both unscaled and clipped inside; DeepSpeed's own first step makes the state
        factors = ours[0]["calls"]
        assert len(factors) >= 2 * (len(seen) - 1) and all(0 < f < 1 for f in factors[:2] + factors[-2:])
