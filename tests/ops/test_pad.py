"""Pad where an element is copied many times, over several dims at once; test_formula_operators.py has the others."""

from __future__ import annotations

import numpy as np
import pytest
from harness import C, Case, R, run_case


def padded(shape, pads, mode, **options):
    """Pads are as of np.pad, per dim, not negative."""
    each = list(zip(*pads, strict=True))
    return Case("Pad", [R(*shape), C([*each[0], *each[1]])], {"mode": mode},
                reference=lambda x, p: np.pad(x, pads, mode), fd=True, alloc=False, name=f"{shape}-{pads}-{mode}",
                **options)


CASES = [padded((2, 3, 4), ((1, 0), (2, 2), (3, 1)), mode, opset=19) for mode in ("reflect", "edge", "wrap")]
CASES += [padded((3, 2), ((0, 0), (7, 8)), mode, opset=19) for mode in ("reflect", "edge", "wrap")]
CASES += [padded((3, 1), ((2, 0), (4, 3)), mode, opset=19) for mode in ("edge", "wrap")]
CASES += [padded((2, 3, 4, 5), ((0, 0), (0, 0), (2, 1), (0, 3)), "constant"),
          padded((2, 3, 4, 5), ((1, 0), (0, 0), (2, 1), (0, 0)), "constant")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pad(case):
    run_case(case)
