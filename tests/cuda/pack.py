"""Writes an archive of the built package and of the scripts that gpu.sh runs on a GPU. gpu.sh calls it.

    python tests/cuda/pack.py FILE.tar.xz [--plugin PATH]

PATH (onnxtrain/_cuda.so) is what the archive has as onnxtrain/_cuda.so. Which helpers the scripts need is found from
their imports. The archive must stay below 30 MB, so that it can be sent to a machine that reaches no network.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tarfile
from pathlib import Path

from runner import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
# Where imports are found: gpu.sh's PYTHONPATH, this folder, and what workloads.py adds.
FOLDERS = [ROOT / name for name in ("tests", "tests/bench", "tests/graph", "tests/models", "tests/ops", "tests/optim",
                                    "tests/cuda", "examples/getting_started")]
MOST = 30_000_000  # bytes
PACKAGE = {".py", ".pyi", ".so"}


def imported(path: Path) -> set[Path]:
    """The files of FOLDERS that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    files = (folder / f"{name}.py" for name in names for folder in FOLDERS)
    return {file for file in files if file.exists()}


def scripts() -> set[Path]:
    """The runner's scripts and the benchmark, with all that they import; cases.py imports every module of tests/ops."""
    here = ROOT / "tests/cuda"
    found: set[Path] = set()
    new = {here / "runner.py", here / "gpu.sh", ROOT / "tests/bench/gpu.py", *(here / f"{name}.py" for name in SCRIPTS),
           *(ROOT / "tests/ops").glob("*.py")}
    while new:
        found |= new
        new = {file for path in new if path.suffix == ".py" for file in imported(path)} - found
    return found


def contents(plugin: Path) -> dict[str, Path]:
    """The archive's files by their names in it."""
    package = ROOT / "onnxtrain"
    files = {path for path in package.rglob("*") if path.suffix in PACKAGE or path.parent.name == "_libs"}
    files -= {package / "_cuda.so", package / "_mpi.so"}  # the latter needs mpirun
    needed = [ROOT / "LICENSE", *scripts(), *files]
    named = {path.relative_to(ROOT).as_posix(): path for path in needed if path.is_file()}
    return {**named, "onnxtrain/_cuda.so": plugin}


def pack(target: Path, plugin: Path, preset: int = 6) -> int:
    """Writes the archive, compressed by a preset of xz; its size in bytes."""
    with tarfile.open(target, "w:xz", preset=preset) as archive:
        for name, path in sorted(contents(plugin).items()):
            data = path.read_bytes()
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return target.stat().st_size


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--plugin", type=Path, default=ROOT / "onnxtrain/_cuda.so")
    chosen = parser.parse_args(arguments)
    missing = [path for path in (chosen.plugin, ROOT / "onnxtrain/_C.abi3.so") if not path.exists()]
    if missing:
        print(f"{missing[0]} is not built", file=sys.stderr)
        return 1
    size = pack(chosen.file, chosen.plugin)
    print(f"{chosen.file}: {size / 1e6:.1f} MB")
    if size > MOST:
        print(f"the archive must stay below {MOST / 1e6:.0f} MB", file=sys.stderr)
    return int(size > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
