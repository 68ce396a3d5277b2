"""kernels/flash_hidden.cu: attention leaves out the tiles that bias and mask hide, and no others."""

from __future__ import annotations

import pytest
from test_emulated import built, run


@pytest.mark.parametrize(("order", "part"), [("", ()), ("reverse", ("0/4",))])
def test_hidden_tiles(order, part):
    report = run("tiles.py", built("asan", "--sanitize"), *part, ONT_EMULATE_ORDER=order)
    assert report["passed"] >= 10
    assert not report["failed"], "\n".join(f"{what}: {message}" for what, message in report["failed"])
