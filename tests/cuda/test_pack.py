"""The archive for a machine with a GPU, rehearsed on the emulated device: in an empty folder, without the tree, every
script starts, finds all that it imports, and runs a slice of its cases.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pack
import pytest
import runner

SLICE = "0/60"  # of which cases.py has some, and each other script one or none


@pytest.fixture(scope="module")
def archive(emulated, tmp_path_factory) -> Path:
    """With the emulated device in place of the CUDA plugin, and packed quickly."""
    file = tmp_path_factory.mktemp("pack") / "onnxtrain.tar.xz"
    pack.pack(file, emulated, preset=0)
    return file


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder


def parts(folder: Path, *names: str, **environment: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    return subprocess.run(["bash", "tests/cuda/gpu.sh", *names], cwd=folder, capture_output=True, text=True,
                          env={**env, "PYTHON": sys.executable, "DEVICE": "emulated", "JOBS": "2", **environment})


def check(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return parts(folder, f"check:{SLICE}", **environment)


def test_the_archive_holds_nothing_else(archive):
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    assert {"onnxtrain/_C.abi3.so", "onnxtrain/_cuda.so", "onnxtrain/_libs/libprotobuf-c.so.1",
            "tests/cuda/gpu.sh"} <= set(names)
    assert all(f"tests/cuda/{script}.py" in names for script in runner.SCRIPTS)
    assert not [name for name in names if name.startswith(("csrc/", "cuda/", "docs/", "build/")) or "__pyc" in name]


def test_every_script_runs_from_the_archive_alone(archive, tmp_path):
    folder = unpacked(archive, tmp_path / "empty")
    done = check(folder)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(f"==== check:{SLICE}: ") and ", 0 failed, " in last, done.stdout[-3000:]
    for script in runner.SCRIPTS:
        assert f"\n{script:14} " in done.stdout, done.stdout
    assert (folder / "build/gpu/check_0_60.jsonl").exists() and (folder / "build/gpu/check_0_60.txt").exists()


def test_the_benchmark_runs_from_the_archive_alone(archive, tmp_path):
    """On the CPU, where it may miss goals of a GPU."""
    folder = unpacked(archive, tmp_path / "bench")
    done = parts(folder, "profile", "bench",
                 BENCH_ARGS="--device cpu --tiny --kinds onnxtrain,eager --rounds 2 --model gpt2")
    assert "Traceback" not in done.stdout + done.stderr, done.stdout[-3000:] + done.stderr[-2000:]
    profile, bench = (folder / f"build/gpu/{name}.txt" for name in ("profile", "bench"))
    assert "==== profile failed" not in done.stdout and "gpt2" in profile.read_text(encoding="utf-8")
    assert bench.read_text(encoding="utf-8").splitlines()[-1].startswith(("all goals are met", "missed: "))


def test_a_planted_failure_and_a_timeout_end_it_with_a_status(archive, tmp_path):
    """A case of optim.py that fails, and dropout.py, which does not return."""
    folder = unpacked(archive, tmp_path / "planted")
    for script, text in (("optim", "def planted():\n    raise AssertionError('planted')\nCHECKS.insert(0, planted)\n"),
                         ("dropout", "def planted():\n    __import__('time').sleep(100)\nCHECKS.insert(0, planted)\n")):
        path = folder / f"tests/cuda/{script}.py"
        whole = path.read_text(encoding="utf-8")
        path.write_text(whole.replace('\n\nif __name__ == "__main__":', f'\n\n{text}\n\nif __name__ == "__main__":'),
                        encoding="utf-8")
    done = check(folder, LIMIT="40")
    assert done.returncode == 1, done.stdout
    assert "FAILED optim 0/60: planted: AssertionError: planted" in done.stdout, done.stdout[-3000:]
    assert "FAILED dropout 0/60: dropout 0/60: stopped after " in done.stdout, done.stdout[-3000:]
    assert f"==== check:{SLICE} failed: " in done.stdout
