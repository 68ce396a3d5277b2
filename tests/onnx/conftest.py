"""The loader under sanitizers, built once for all files here."""

from __future__ import annotations

from pathlib import Path

import loader_build
import pytest


@pytest.fixture(scope="session")
def check() -> Path:
    return loader_build.build(loader_build.ROOT / "build/loader_check")
