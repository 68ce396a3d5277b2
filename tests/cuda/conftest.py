"""The emulated device without the sanitizer, for tests that load it into their own process or run whole models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import planted
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def emulated() -> Path:
    """The plugin's path."""
    done = subprocess.run([sys.executable, str(ROOT / "cuda/emulate/build.py"), str(ROOT / "build/emulated/plain")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture
def plugin_of_peers(emulated, monkeypatch) -> str:
    """The same, for processes that import peers.py."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests/cuda"), os.environ["PYTHONPATH"]]))
    return str(emulated)


@pytest.fixture(scope="module")
def planted_faults(request) -> planted.Planted:
    """Those of the test file's FAULTS."""
    return planted.Planted(request.module.FAULTS)
