"""Builds the emulated CUDA device: kernels, operators and fakes of the libraries as one plugin, for tests.

    python cuda/emulate/build.py FOLDER [--sanitize]

writes FOLDER/_emulated.so and prints its path; what is newer than its sources is left as it is.
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
         f"-DONT_MATH_PATH=\"{CUDA}/kernels/math.cuh\""]


def sources() -> list[Path]:
    kernels = sorted((CUDA / "kernels").glob("*.cu"))
    shared = [CUDA / name for name in ("table.c", "generate.c")] + sorted((CUDA / "ops").glob("*.c"))
    return [*kernels, *shared, *sorted((CUDA / "emulate").glob("*.c*"))]


def is_new(made: Path) -> bool:
    """Whether an object is newer than all that it was made from, by the make rule that the compiler wrote beside it."""
    try:
        names = made.with_suffix(".d").read_text().split(":", 1)[1].replace("\\\n", " ").split()
        return made.stat().st_mtime > max(Path(name).stat().st_mtime for name in names)
    except OSError:
        return False


def build(folder: Path, sanitize: bool = False) -> Path:
    """The plugin's path. Raises CalledProcessError where a source does not compile."""
    target = folder / "_emulated.so"
    objects = [folder / f"{source.name}.o" for source in sources()]
    if target.exists() and all(is_new(made) and made.stat().st_mtime < target.stat().st_mtime for made in objects):
        return target
    extra = ["-O1", "-g1", "-fsanitize=address", "-fno-omit-frame-pointer"] if sanitize else ["-O1"]
    cc, cxx = shlex.split(os.environ.get("CC", "cc")), shlex.split(os.environ.get("CXX", "c++"))

    def compile_one(source: Path, out: Path) -> None:
        if is_new(out):
            return
        language = [*cc, "-std=gnu11"] if source.suffix == ".c" else [*cxx, "-std=c++17", "-x", "c++"]
        fresh = f"{out}.new"  # whole, or not there
        subprocess.run([*language, *FLAGS, *extra, "-MMD", "-MF", str(out.with_suffix(".d")), "-c", str(source), "-o",
                        fresh], check=True)
        os.replace(fresh, out)

    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("ONNXTRAIN_JOBS", os.cpu_count() or 1))) as pool:
        list(pool.map(compile_one, sources(), objects))
    fresh = folder / "_emulated.so.new"
    subprocess.run([*cxx, "-shared", *map(str, objects), "-o", str(fresh), "-lm", "-lpthread",
                    *(["-fsanitize=address"] if sanitize else [])],
                   check=True)
    fresh.replace(target)
    return target


if __name__ == "__main__":
    made = Path(sys.argv[1])
    made.mkdir(parents=True, exist_ok=True)
    with open(made / "lock", "w", encoding="ascii") as lock:  # two workers of a test run must not write one object
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(build(made, "--sanitize" in sys.argv[2:]))
