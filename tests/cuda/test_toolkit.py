"""The CUDA library with a toolkit that is too old: left out with a message, or an error if it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# setup.py's own class, without a build of the core.
BUILD = """
import runpy, setuptools
from pathlib import Path
setuptools.setup = lambda **options: None
names = runpy.run_path("setup.py")
print(names["dependencies"].cuda_version(names["dependencies"].cuda_home()))
names["BuildCore"].build_cuda(object.__new__(names["BuildCore"]), Path("none"), Path("none"))
"""


def build(home: Path, version: int, wanted: str) -> subprocess.CompletedProcess:
    """With a toolkit whose compiler must not be called."""
    for folder in ("bin", "include"):
        (home / folder).mkdir(exist_ok=True)
    (home / "include/cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n", encoding="utf-8")
    (home / "bin/nvcc").write_text("#!/bin/sh\nexit 70\n", encoding="utf-8")
    (home / "bin/nvcc").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("CUDACXX", "ONNXTRAIN_CUDA")}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", BUILD], cwd=ROOT, capture_output=True, text=True,
                          env={**env, "CUDA_HOME": str(home), **({"ONNXTRAIN_CUDA": wanted} if wanted else {})})


@pytest.mark.parametrize(("version", "shown"), [(12040, "12.4"), (11080, "11.8"), (12060, "12.6")])
def test_an_older_toolkit_is_left_out(tmp_path, version, shown):
    message = f"the CUDA toolkit in {tmp_path} is {shown}, and 12.8 or later is needed"
    done = build(tmp_path, version, "auto")
    assert done.returncode == 0 and message in done.stderr and "built without" in done.stderr, done.stderr
    done = build(tmp_path, version, "1")
    assert done.returncode != 0 and f"ONNXTRAIN_CUDA=1, but {message}" in done.stderr, done.stderr


def test_without_being_asked_nothing_is_built(tmp_path):
    assert build(tmp_path, 12080, "").returncode == 0


def test_versions_are_read_from_the_header(tmp_path):
    """And what is new enough is compiled."""
    done = build(tmp_path, 12080, "auto")
    assert done.stdout == "(12, 8)\n" and "is needed" not in done.stderr and done.returncode != 0
    assert build(tmp_path, 13010, "auto").stdout == "(13, 1)\n"
