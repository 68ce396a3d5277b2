"""ArgMax, ArgMin and TopK of lines that are longer than a block of threads, with ties and NaN."""

from __future__ import annotations

import numpy as np
import pytest
from harness import C, Case, R, V, run_case


def ties(*shape):
    values = np.random.default_rng(5).integers(0, 9, shape).astype(np.float64)
    values.flat[values.size // 3] = values.flat[values.size // 2] = np.nan
    return V(values)


def first(x, axis, kind):
    """NaN before all numbers, then the lowest position."""
    return np.argmax(np.where(np.isnan(x), np.inf, x if kind == "ArgMax" else -x), axis)[..., None]


CASES = [Case(kind, [ties(3, 700)], {"axis": -1}, grad=False, alloc=False, name="long",
              reference=lambda x, kind=kind: first(x, -1, kind)) for kind in ("ArgMax", "ArgMin")]
CASES += [Case("ArgMax", [R(2, 9, 40)], {"axis": 1}, grad=False, alloc=False, name="columns")]
CASES += [Case("TopK", [R(3, 500), C([k])], {"largest": largest}, n_outputs=2, fd=False, alloc=False)
          for k in (1, 9, 500) for largest in (0, 1)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_select(case):
    run_case(case)
