"""GroupNormalization of sizes that need several steps of a block of threads; test_groupnorm.py has the small ones."""

from __future__ import annotations

import pytest
from harness import run_case
from test_groupnorm import group, instance

CASES = [group((2, 6, 11, 13), 2), group((3, 64), 4), group((2, 40, 5), 1), instance((2, 3, 17, 19)),
         group((2, 6, 9), 3, opset=18)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups(case):
    run_case(case)
