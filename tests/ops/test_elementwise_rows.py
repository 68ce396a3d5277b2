"""Mod, Pow, PRelu, IsInf and Sum compute every number type, and broadcast by attribute before opset 7."""

import numpy as np
import pytest
import torch
from harness import Case, R, V, flat, run_case

INTS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)


def old(op, *shapes, torch, **attrs):
    return Case(op, [R(*s, apart=0.3) for s in shapes], attrs, opset=6, torch=torch, reference=lambda *x: torch(
        *[globals()["torch"].tensor(v) for v in x]).numpy(), name=f"opset 6, {attrs}")


CASES = [
    Case("Mod", [R(3, 4), R(4, apart=0.5)], torch=torch.remainder, fd=False),
    Case("Mod", [R(3, 4), R(4, apart=0.5)], {"fmod": 1}, torch=torch.fmod, fd=False),
    flat("Mod", V([3.0, -3.0, 0.0, -0.0, 5.5]), V([-2.0, 2.0, -1.0, 1.0, np.inf]), name="signs",
         reference=lambda x, y: np.array([-1, 1, -0.0, 0.0, 5.5], x.dtype)),
    *(flat("Mod", R(5, dtype=t, low=0, high=100), R(5, dtype=t, low=1, high=9)) for t in INTS),
    *(flat("Pow", R(4, dtype=np.float32), R(4, dtype=t, low=0, high=4)) for t in INTS),
    flat("Pow", R(4, dtype=np.uint8, low=0, high=4), R(4, dtype=np.uint8, low=0, high=3)),
    *(flat("PRelu", R(2, 3, dtype=t, low=lo, high=9), R(3, dtype=t, low=0, high=9))
      for t, lo in ((np.int32, -9), (np.int64, -9), (np.uint32, 0), (np.uint64, 0))),
    flat("IsInf", V([1.0, np.inf, -np.inf, np.nan], np.float16)),
    old("Sum", (2, 3), (2, 3), (2, 3), torch=lambda x, y, z: x + y + z),
    old("PRelu", (2, 3, 4), (3,), torch=lambda x, s: torch.prelu(x, s)),
    old("PRelu", (2, 3), (1,), torch=lambda x, s: torch.prelu(x, s)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)
