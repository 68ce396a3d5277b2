"""Builds the emulated CUDA device: kernels, operators and fakes of the libraries as one plugin, for tests.

    python cuda/emulate/build.py FOLDER [--sanitize | --races [KERNELS]]

writes FOLDER/_emulated.so and prints its path; what is newer than its sources is left as it is. --sanitize is
AddressSanitizer. With --races kernels report their accesses to races.cc, and a launch with a data race fails; KERNELS
is one more file of kernels, for a test of that.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import shlex
import subprocess
import sys
from pathlib import Path

CUDA = Path(__file__).resolve().parents[1]
CORE = CUDA.parent / "csrc"
FLAGS = ["-DONT_EMULATE", "-fPIC", "-fvisibility=hidden", "-fwrapv", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror",
         "-Wno-type-limits", "-Wno-maybe-uninitialized", "-D_GNU_SOURCE", f"-I{CUDA}", f"-I{CORE}",
         f"-I{CUDA}/emulate/include",
         f"-DONT_MATH_PATH=\"{CUDA}/kernels/math.cuh\""]
KINDS = {"": ["-O1"], "--sanitize": ["-O1", "-g1", "-fsanitize=address", "-fno-omit-frame-pointer"],
         "--races": ["-O1", "-g1", "-DONT_RACES"]}
# Kernels, with --races; the library of that sanitizer is not linked, nor are its guards of static variables.
WATCHED = ["-fsanitize=thread", "-fno-threadsafe-statics"]
# Kernels: accesses that are not aligned to their size call emulate.cc.
KERNELS = ["-fsanitize=alignment"]


def sources(*more: str) -> list[Path]:
    kernels = sorted((CUDA / "kernels").glob("*.cu"))
    named = [CUDA / name for name in ("table.c", "generate.c", "images.c", "shared.c", "libs/cublas.c", "libs/cudnn.c",
                                      "libs/sdpa.c", "libs/conv_graph.c", "libs/rnn.c", "libs/nccl.c")]
    folders = [path for name in ("ops", "emulate") for path in sorted((CUDA / name).glob("*.c*"))]
    return [*kernels, *map(Path, more), *named, *folders]


def object_name(source: Path) -> str:
    """With the folder: a library and its emulation have the same name."""
    path = source.relative_to(CUDA) if source.is_relative_to(CUDA) else Path(source.name)
    return f"{path.as_posix().replace('/', '.')}.o"


def is_new(made: Path) -> bool:
    """Whether an object is newer than all that it was made from, by the make rule that the compiler wrote beside it."""
    try:
        names = made.with_suffix(".d").read_text().split(":", 1)[1].replace("\\\n", " ").split()
        return made.stat().st_mtime > max(Path(name).stat().st_mtime for name in names)
    except OSError:
        return False


def compiler(name: str, default: str) -> list[str]:
    return shlex.split(os.environ.get(name, default))


def compile_one(source: Path, out: Path, kind: str = "") -> None:
    if is_new(out):
        return
    language = [*compiler("CC", "cc"), "-std=gnu11"] if source.suffix == ".c" else [*compiler("CXX", "c++"),
                                                                                   "-std=c++17", "-x", "c++"]
    extra = [*KERNELS, *(WATCHED if kind == "--races" else [])] if source.suffix == ".cu" else []
    fresh = f"{out}.new"  # whole, or not there
    subprocess.run([*language, *FLAGS, *KINDS[kind], *extra, "-MMD", "-MF", str(out.with_suffix(".d")), "-c",
                    str(source), "-o", fresh], check=True)
    os.replace(fresh, out)


def link(objects: list[Path], target: Path, kind: str = "") -> None:
    fresh = f"{target}.new"
    subprocess.run([*compiler("CXX", "c++"), "-shared", *map(str, objects), "-o", fresh, "-lm", "-lpthread",
                    *(["-fsanitize=address"] if kind == "--sanitize" else [])], check=True)
    os.replace(fresh, target)


def build(folder: Path, kind: str = "", *more: str) -> Path:
    """The plugin's path. Raises CalledProcessError where a source does not compile."""
    target = folder / "_emulated.so"
    objects = [folder / object_name(source) for source in sources(*more)]
    if target.exists() and all(is_new(made) and made.stat().st_mtime < target.stat().st_mtime for made in objects):
        return target
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("ONNXTRAIN_JOBS", os.cpu_count() or 1))) as pool:
        list(pool.map(lambda job: compile_one(*job, kind), zip(sources(*more), objects)))
    link(objects, target, kind)
    return target


if __name__ == "__main__":
    made = Path(sys.argv[1])
    made.mkdir(parents=True, exist_ok=True)
    with open(made / "lock", "w", encoding="ascii") as lock:  # two workers of a test run must not write one object
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(build(made, *sys.argv[2:]))
