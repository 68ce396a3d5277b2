"""Where the build finds what it does not own: the ONNX schema, protobuf-c, oneDNN. setup.py is the only caller.

Each function returns paths or raises SystemExit with one sentence that says what is missing and how to get it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
from pathlib import Path


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
    found = subprocess.run(["cc", "-print-file-name=libprotobuf-c.so.1"], capture_output=True, text=True, check=True)
    library = Path(found.stdout.strip())
    if not library.is_absolute():
        raise SystemExit("onnxtrain: libprotobuf-c is missing: apt-get install libprotobuf-c-dev")
    return compiler, library.resolve()


def _file_of(distribution: str, name: str) -> Path:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"onnxtrain: {distribution} is needed at build time: pip install {distribution}") from None
    for file in files:
        if file.name == name:
            return Path(file.locate()).resolve()
    raise SystemExit(f"onnxtrain: {distribution} has no {name}")


def onednn() -> tuple[Path, Path, Path]:
    """oneDNN's include directory, libdnnl.so.3 and its licence text."""
    header = _file_of("onednn-devel-cpu-gomp", "dnnl.h")
    return header.parent, _file_of("onednn-cpu-gomp", "libdnnl.so.3"), _file_of("onednn-cpu-gomp", "LICENSE.txt")
