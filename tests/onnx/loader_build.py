"""Builds and runs loader_check.c with address and undefined-behaviour sanitizers, for the tests here and fuzz.py."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "third_party"))
import dependencies  # noqa: E402

FLAGS = ["-std=c11", "-O1", "-g", "-D_GNU_SOURCE", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
         "-fno-omit-frame-pointer", "-fopenmp"]


def build(folder: Path) -> Path:
    """Compiles into `folder` what is older than its sources, and returns the program.

    Processes that test at the same time wait for each other: a program is not linked again while another runs it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(folder)


def _build(folder: Path) -> Path:
    cc = shlex.split(os.environ.get("CC", "cc"))
    compiler, library = dependencies.protobuf_c()
    proto = dependencies.onnx_proto()
    generated = folder / "onnx-ml.pb-c.c"
    if not generated.exists():
        subprocess.run([compiler, f"--proto_path={proto.parent}", f"--c_out={folder}", proto.name], check=True)
    sources = [p for layer in ("base", "ir", "onnx") for p in sorted((ROOT / "csrc" / layer).glob("*.c"))]
    sources += [generated, Path(__file__).with_name("loader_check.c")]
    newest = max(p.stat().st_mtime for layer in ("base", "ir", "onnx",
                                                 "ops") for p in (ROOT / "csrc" / layer).rglob("*.h"))

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(newest, source.stat().st_mtime):
            subprocess.run([*cc, *FLAGS, f"-I{ROOT / 'csrc'}", f"-isystem{folder}", "-c", str(source), "-o",
                            str(target)],
                           check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "loader_check"
    if program.exists() and program.stat().st_mtime >= max(o.stat().st_mtime for o in objects):
        return program
    subprocess.run([*cc, *FLAGS, *map(str, objects), str(library), "-lm", "-o", str(program)], check=True)
    return program


def run(check: Path, *arguments) -> str:
    result = subprocess.run([check, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def answers(check: Path, models: list[bytes]) -> list[str]:
    """One line of "STATUS message" a model, after load, write, load and write."""
    data = b"".join(len(m).to_bytes(8, "little") + m for m in models)
    result = subprocess.run([check, "stream"], input=data, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    lines = result.stdout.decode().splitlines()
    assert len(lines) == len(models), lines
    return lines


def text(check: Path, tmp_path: Path, m: onnx.ModelProto) -> str:
    path = tmp_path / "model.onnx"
    path.write_bytes(m.SerializeToString())
    return run(check, "text", path)
