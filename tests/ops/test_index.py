"""Scatters with many updates of one element, and gathers with batches of tuples, of sizes for several blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import Case, R, V, run_case

RANDOM = np.random.default_rng(3)


def positions(*shape, below, low=0):
    return V(RANDOM.integers(low, below, shape), np.int64)


CASES = [Case("ScatterElements", [R(7, 5), positions(300, 4, below=7, low=-7), R(300, 4)],
              {"axis": 0, "reduction": reduction}, opset=18, fd=False, alloc=False, name=f"many {reduction}", tol=1e-4)
         for reduction in ("none", "add", "max", "min")]
CASES += [Case("ScatterND", [R(6, 3, 2), positions(200, 1, below=6), R(200, 3, 2)], {"reduction": reduction}, opset=18,
               fd=False, alloc=False, name=f"many {reduction}", tol=1e-4) for reduction in ("none", "add", "max")]
CASES += [Case("ScatterElements", [R(9, dtype=np.int64, low=0, high=5), positions(90, below=9),
                                   R(90, dtype=np.int64, low=0, high=5)], {"reduction": "add"}, opset=18, grad=False,
               alloc=False, name="integers"),
          Case("GatherND", [R(3, 4, 5), positions(3, 70, 1, below=4)], {"batch_dims": 1}, fd=False, alloc=False,
               name="many of a batch", tol=1e-4),
          Case("GatherElements", [R(4, 3, 5), positions(4, 90, 5, below=3, low=-3)], {"axis": 1}, fd=False, alloc=False,
               name="many", tol=1e-4),
          Case("TorchGatherElements", [R(4, 3, 5), positions(4, 9, 5, below=3)], {"axis": 1}, domain="ai.onnxtrain",
               torch=lambda x, i: torch.gather(x, 1, i), fd=False, alloc=False, tol=1e-4),
          Case("TorchScatterElements", [R(7, 5), positions(30, 4, below=7), R(30, 4)], {"axis": 0, "reduction": "add"},
               domain="ai.onnxtrain", torch=lambda x, i, u: x.scatter_add(0, i, u), fd=False, alloc=False, tol=1e-4)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_index(case):
    run_case(case)
