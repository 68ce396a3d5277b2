"""One thread for the many small steps here, or as many as ONNXTRAIN_TEST_THREADS says (tests/threads.py); the tests that
are about threads set their own number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("ONNXTRAIN_TEST_THREADS", "1")))
    yield
    torch.set_num_threads(before)
