"""`python -m onnxtrain`: what this build and this machine have, and how to get what is missing; for bug reports.
USAGE has the commands.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import runpy
import sys
from pathlib import Path

import torch

from onnxtrain import _C, UnsupportedError, _torch, options

_SHARED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY")  # of the libraries beneath
USAGE = """usage: python -m onnxtrain [COMMAND ...]: without a command, what this build and this machine have

  run [--outputs NAMES] SCRIPT ...  runs a script with onnxruntime.training importable; NAMES: results that it reads
  alias on [--user]                 makes onnxruntime.training importable in this environment, or for this user
  alias off, alias status           takes that away; says what is where
  migrate SCRIPT ...                lists what scripts use of onnxruntime-training; status 1 if anything must change
  finetune --model M --data D --out O ...  LoRA fine-tuning of a language model; finetune --help has its options
  doctor                            lists the private names of this PyTorch that onnxtrain uses, and whether it knows
                                    their source; status 1 if one is unknown or missing"""


def main(arguments: list[str]) -> int:
    """Runs one command; the status of the process."""
    match arguments:
        case []:
            build()
        case ["-h" | "--help"]:
            print(USAGE)
        case ["run", "--outputs", names, script, *rest]:
            os.environ["ORTMODULE_OUTPUTS"] = names
            run(script, rest)
        case ["run", script, *rest] if not script.startswith("-"):
            run(script, rest)
        case ["alias", "on" | "off" | "status" as command] | ["alias", "on" as command, "--user"]:
            from onnxtrain.compat import _environment

            return _environment.main(command, user="--user" in arguments)
        case ["migrate", *scripts] if scripts:
            return migrate(scripts)
        case ["finetune", *rest]:
            from onnxtrain import finetune

            return finetune.main(rest)
        case ["doctor"]:
            text, is_well = _torch.doctor()
            print(text)
            return 0 if is_well else 1
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


def run(script: str, rest: list[str]) -> None:
    """The script as __main__, as `python script.py` would run it. Exits where there is no such file."""
    if not os.path.exists(script):
        sys.exit(f"{script}: there is no such file")
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
        if "_cuda.so" in str(error):
            return "not in this build; ONNXTRAIN_CUDA=1 pip install . builds it where nvcc is installed"
        return f"in this build, but not usable here: {error}"
    lacks = [f"missing: {plugin['missing']}"] if plugin["missing"] else []
    return "; ".join([plugin["about"], *lacks, *filter(None, [plugin["left_out"]])])


def nccl() -> str:
    """Whether tensors of a GPU go through NCCL beside MPI."""
    try:
        return _C.comm_about("cuda")
    except (UnsupportedError, ValueError):
        return "not usable here: it needs the CUDA part, a GPU, and libnccl.so.2, which a CUDA build of torch brings"


def mpi() -> str:
    """Whether this build has the collectives of MPI, and this machine the library."""
    path = Path(_C.__file__).with_name("_mpi.so")
    if not path.exists():
        return "not in this build; ONNXTRAIN_MPI=1 builds it where mpicc is installed"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"in this build, but not usable here: {error}"
    return "in this build, for processes that mpirun starts"


def processor() -> str:
    """Its name, and how many of its threads this process may use."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.processor() or platform.machine()}, {usable} usable hardware threads"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def variables() -> list[tuple[str, str]]:
    """The variables that are set; what is wrong with them is logged."""
    options.warn_of_ignored()
    return [(name, text if name in {*options.KNOWN, *options.IGNORED, *_SHARED} else f"{text} (not read at run time)")
            for name, text in sorted(os.environ.items())
            if name.startswith(("ORTMODULE_", "ONNXTRAIN_")) or name in _SHARED]


def build() -> None:
    """Prints what a bug report needs: versions, processor, this build, and the variables that are set."""
    info = _C.build_info()
    libraries = [name for name in info["gemm"] if name != "reference"]
    rows = [
        ("onnxtrain", f"{info['version']}, {info['operators']} operators"),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
        ("torch", torch.__version__),
        ("onnx, onnxscript", f"{_version('onnx')}, {_version('onnxscript')}"),
        ("processor", processor()),
        ("instruction set", f"{info['isa']}; ONNXTRAIN_ISA sets a lower one"),
        ("threads", f"{info['threads']}; torch.set_num_threads() changes the number"),
        ("matrix products", f"by the fastest of {', '.join(libraries)}" if libraries
         else "by the reference loop only, which is slow: torch's BLAS was not found"),
        ("oneDNN", "in use, also for convolutions" if "onednn" in libraries
         else "not found: convolutions run as matrix products" + ("; install the wheel, which brings it"
                                                                  if platform.machine() == "x86_64" else "")),
        ("tensor exchange", "DLPack's C functions" if info["dlpack_exchange"]
         else "DLPack's Python protocol, which is slower; torch 2.10 and later have C functions"),
        ("CUDA", cuda()),
        ("NCCL", nccl()),
        ("MPI", mpi()),
        *(variables() or [("variables", "no ORTMODULE_* and no ONNXTRAIN_* variable is set")]),
    ]
    for name, text in rows:
        print(f"{name:<18} {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
