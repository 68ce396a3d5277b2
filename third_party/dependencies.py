"""Where the build finds what it does not own: the ONNX schema, protobuf-c, oneDNN, nvcc, MPI.

setup.py and the loader's tests call it. What the build needs is returned as paths, or SystemExit says in one sentence
what is missing and how to get it; what the build can do without is None.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path


def c_compiler() -> list[str]:
    """CC, with its options."""
    return shlex.split(os.environ.get("CC", "cc"))


def machine() -> str:
    """The processor that the compiler compiles for, as in x86_64 or aarch64."""
    shown = subprocess.run([*c_compiler(), "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    return shown.split("-")[0].strip()


def is_clang() -> bool:
    shown = subprocess.run([*c_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return "clang" in shown


def onnx_proto() -> Path:
    """onnx-ml.proto of the installed `onnx` wheel."""
    spec = importlib.util.find_spec("onnx")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("onnxtrain: the `onnx` package is needed at build time: pip install onnx")
    return Path(next(iter(spec.submodule_search_locations))) / "onnx-ml.proto"


def protobuf_c() -> tuple[str, Path]:
    """The protobuf-c compiler's command and the path of libprotobuf-c.so.1."""
    compiler = shutil.which("protoc-c")
    if compiler is None:
        raise SystemExit("onnxtrain: protoc-c is missing: apt-get install protobuf-c-compiler libprotobuf-c-dev")
    found = subprocess.run([*c_compiler(), "-print-file-name=libprotobuf-c.so.1"], capture_output=True, text=True,
                           check=True)
    library = Path(found.stdout.strip())
    if not library.is_absolute():
        raise SystemExit("onnxtrain: libprotobuf-c is missing: apt-get install libprotobuf-c-dev")
    return compiler, library.resolve()


def protobuf_c_licence() -> Path:
    """The licence text that goes into the wheel with the library; PROTOBUF_C_LICENSE names it elsewhere."""
    places = [os.environ.get("PROTOBUF_C_LICENSE"), "/usr/share/doc/libprotobuf-c1/copyright",
              "/usr/share/doc/libprotobuf-c-dev/copyright", "/usr/share/licenses/protobuf-c/LICENSE"]
    for place in places:
        if place and Path(place).exists():
            return Path(place)
    raise SystemExit("onnxtrain: the licence text of protobuf-c is not found: set PROTOBUF_C_LICENSE to its path")


def _file_of(distribution: str, name: str) -> Path:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"onnxtrain: {distribution} is needed at build time: pip install {distribution}") from None
    for file in files:
        if file.name == name:
            return Path(file.locate()).resolve()
    raise SystemExit(f"onnxtrain: {distribution} has no {name}")


def onnx_licence() -> Path:
    """ONNX's licence text: the reader of models is generated from its schema."""
    return _file_of("onnx", "LICENSE")


def onednn() -> tuple[Path, Path, Path] | None:
    """oneDNN's include directory, libdnnl.so.3 and its licence text; None for processors that PyPI has none for."""
    if machine() != "x86_64":
        return None
    header = _file_of("onednn-devel-cpu-gomp", "dnnl.h")
    return header.parent, _file_of("onednn-cpu-gomp", "libdnnl.so.3"), _file_of("onednn-cpu-gomp", "LICENSE.txt")


def nvcc() -> str | None:
    """CUDACXX, else CUDA_HOME's nvcc, else the one on PATH."""
    named = os.environ.get("CUDACXX")
    if named:
        return shutil.which(named)
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")


def cuda_home() -> Path | None:
    """Where the runtime's headers are: CUDA_HOME, else nvcc's own."""
    compiler = nvcc()
    home = Path(os.environ["CUDA_HOME"]) if os.environ.get("CUDA_HOME") else None
    if home is None and compiler:
        home = Path(compiler).resolve().parents[1]
        if not (home / "include/cuda_runtime_api.h").exists():  # a wrapper on PATH: nvcc says where it looks
            shown = subprocess.run([compiler, "-dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True,
                                   text=True).stderr
            tops = [line.split("TOP=", 1)[1].strip() for line in shown.splitlines() if "TOP=" in line]
            home = Path(tops[0]).resolve() if tops else home
    return home if home and (home / "include/cuda_runtime_api.h").exists() else None


LEAST_CUDA = (12, 8)  # the first one with cudaLibraryLoadData, which loads generated kernels


def cuda_version(home: Path) -> tuple[int, int]:
    """Of the toolkit whose headers are there; (0, 0) where they do not say."""
    text = (home / "include/cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    number = int(found[1]) if found else 0  # 12080 is 12.8
    return number // 1000, number % 1000 // 10


def cuda_is_too_old(home: Path) -> str:
    (major, minor), (least_major, least_minor) = cuda_version(home), LEAST_CUDA
    return f"the CUDA toolkit in {home} is {major}.{minor}, and {least_major}.{least_minor} or later is needed"


def mpi() -> tuple[list[str], list[str]] | None:
    """The compiler's command for programs of MPI, and libraries to link: MPICC, else CC with MPI_CXX_INCLUDE_PATH, the
    folder of mpi.h, else mpicc on PATH.
    """
    headers, asked = os.environ.get("MPI_CXX_INCLUDE_PATH"), os.environ.get("MPICC")
    if headers and not asked:
        if not (Path(headers) / "mpi.h").exists():
            raise SystemExit(f"onnxtrain: MPI_CXX_INCLUDE_PATH is {headers}, and there is no mpi.h in it")
        # Debian has the libraries in .../openmpi/lib beside .../openmpi/include, others in lib beside include
        beside = [Path(headers).parent / name for name in ("lib", "lib64")]
        places = [f"-L{place}" for place in beside if place.is_dir()]
        return [*c_compiler(), f"-isystem{headers}"], [*places, "-lmpi"]
    found = shutil.which(asked or "mpicc")
    return ([found], []) if found else None
