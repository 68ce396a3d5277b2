"""`python -m onnxtrain`: what this build and this machine have, and how to get what is missing.

| command | what it does |
| --- | --- |
| `run script.py ...` | runs a script with `onnxruntime.training` importable |
| `migrate script.py ...` | lists what scripts use of onnxruntime-training; status 1 if anything must change |
| `profile trace.json` | prints where the time of a trace of DebugOptions(profile=) went |
"""

from __future__ import annotations

import ctypes
import runpy
import sys
from pathlib import Path

import torch

from onnxtrain import _C

USAGE = "usage: python -m onnxtrain [run script.py ... | migrate script.py ... | profile trace.json]"


def main(arguments: list[str]) -> int:
    """Runs one command; the status of the process."""
    match arguments:
        case []:
            build()
        case ["run", script, *rest] if script not in ("-h", "--help"):
            run(script, rest)
        case ["migrate", *scripts] if scripts:
            return migrate(scripts)
        case ["profile", trace]:
            from onnxtrain._profile import table

            print(table(Path(trace)))
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


def run(script: str, rest: list[str]) -> None:
    """The script as __main__, as `python script.py` would run it."""
    import onnxtrain.compat.onnxruntime  # noqa: F401

    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def migrate(scripts: list[str]) -> int:
    """A report of each script. 0: they run as they are; 1: names must change; 2: a file could not be read."""
    from onnxtrain._migrate import report

    status = 0
    for script in scripts:
        try:
            text, works = report(Path(script))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            print(f"{script}: {error}", file=sys.stderr)
            status = 2
            continue
        print(text)
        status = max(status, 0 if works else 1)
    return status


def cuda() -> str:
    """What the CUDA part of this build has, or lacks."""
    try:
        plugin = _C.open_plugin()
    except OSError as error:
        missing = "_cuda.so" in str(error)
        return "not in this build (built where nvcc is found; ONNXTRAIN_CUDA=1)" if missing else f"built, but {error}"
    return plugin["about"] + (f"; missing: {plugin['missing']}" if plugin["missing"] else "")


def mpi() -> str:
    """Whether this build has the collectives of MPI, and this machine the library."""
    path = Path(_C.__file__).with_name("_mpi.so")
    if not path.exists():
        return "not in this build (built where mpicc is found; ONNXTRAIN_MPI=1)"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"built, but {error}"
    return "_mpi.so, for processes that mpirun starts"


def build() -> None:
    """Prints the table of this build."""
    info = _C.build_info()
    providers = [name for name in info["gemm"] if name != "reference"]
    rows = [
        ("onnxtrain", f"{info['version']}, {info['operators']} operator descriptors"),
        ("torch", torch.__version__),
        ("tensor exchange", "DLPack C table" if info["dlpack_exchange"]
         else "DLPack Python protocol (torch >= 2.10 has the C table)"),
        ("instruction set", f"{info['isa']} (ONNXTRAIN_ISA chooses plain, avx2 or avx512)"),
        ("threads", f"{info['threads']} (torch.set_num_threads)"),
        ("GEMM", ", ".join(providers) or "reference loop only: import torch first; install the wheel with its _libs"),
        ("convolution", "oneDNN, else unrolled windows over GEMM" if "onednn" in providers
         else "unrolled windows over GEMM"),
        ("CUDA", cuda()),
        ("cuDNN, NCCL", "not in this build"),
        ("MPI", mpi()),
    ]
    for name, text in rows:
        print(f"{name:<18} {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
