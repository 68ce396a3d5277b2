"""What NVIDIA's toolchain says, without a GPU, of what cuda/ writes and generates; sass.py: of what it compiles.

    export PYTHONPATH=tests
    python tests/cuda/facts.py fetch nvrtc|headers|disassembler     PyPI's wheels: 58 MB, over 1 GB, 6 MB
    python tests/cuda/facts.py headers                  cuda/libs against the headers of cuBLASLt, cuDNN and NCCL
    python tests/cuda/facts.py generated [COUNT]        generated kernels through NVRTC, for each of ARCHITECTURES

`generated` runs programs, the models of models.py and the cases of tests/ops on the emulated device, and compiles COUNT
of the kernels that they generate, drawn by the seed of the tests, or all: minutes. The tests draw from fewer programs.

Each command prints what is wrong, and ends with status 1 where something is.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from seeds import drawn_seed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build/nvidia"
WHEELS = {"nvrtc": ("nvidia-cuda-nvrtc",), "headers": ("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"),
          "disassembler": ("nvidia-cuda-nvdisasm", "nvidia-cuda-cuobjdump")}
ARCHITECTURES = (80, 90, 100)
ARCHITECTURE = 90  # of the tables of sass.py


# ---- wheels ----

def fetch(part: str) -> None:
    """Headers and NVRTC of wheels that pip downloads; the rest of the libraries is over a gigabyte, and not needed."""
    wanted = re.compile(r"/include/|/lib/libnvrtc|/bin/(nvdisasm|cuobjdump)$")
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *WHEELS[part]],
                       check=True)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(FOLDER / part, [name for name in archive.namelist() if wanted.search(name)])
        for program in (FOLDER / part).rglob("bin/*"):
            program.chmod(0o755)  # which zipfile leaves out


def includes() -> list[Path]:
    """Folders of the headers of cuBLASLt, cuDNN, NCCL and CUDA; empty where one of them is missing."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    found = [next((header.parent for header in sorted(folder.rglob(name))), None) for folder, name in
             ((FOLDER / "headers", "cublasLt.h"), (FOLDER / "headers", "cudnn.h"), (FOLDER / "headers", "nccl.h"))]
    if (toolkit / "library_types.h").exists():
        found.append(toolkit)
    return [path for path in found if path] if len(found) == 4 and None not in found else []


def nvrtc() -> Path | None:
    return next(iter(sorted((FOLDER / "nvrtc").rglob("libnvrtc.so.*"))), None)


# ---- hand-written declarations ----

def check_headers(folders: list[Path], cuda: Path = ROOT / "cuda") -> str:
    """What a compiler says of headers.cc; empty where all is as in NVIDIA's headers."""
    paths = [f"-I{path}" for path in (*folders, cuda, ROOT / "cuda", ROOT / "csrc")]
    return subprocess.run(["c++", "-std=c++17", "-fsyntax-only", "-Wno-deprecated-declarations", *paths,
                           str(HERE / "headers.cc")], capture_output=True, text=True).stderr


# ---- generated kernels ----

# Scripts and their arguments: of what the tests draw from, and what there is besides.
PROGRAMS = (("programs.py", "mlp,mlp_halves,transformer,loss,groups,steps,drops,gelu_epilogues"), ("dropout.py", "2/7"))
MODELS_AND_CASES = tuple((script, f"{part}/4") for script in ("models.py", "cases.py") for part in range(4))
EMULATED = '#include "kernels/launch.cuh"\n'  # the emulation's preamble and footer: cuda/emulate/jit.c
FOOTER = '\nextern "C" __attribute__((visibility("default"))) int ont_fused_launch'


def generated_sources(plugin: Path, scripts: Iterable[tuple[str, str]] = PROGRAMS) -> list[str]:
    """The kernels that scripts of this folder generate, with the emulation's preamble, each once, in the order of their
    texts. Raises RuntimeError where a script, or one of its cases, fails.
    """
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    paths = os.pathsep.join(str(ROOT / path) for path in ("", *options["pythonpath"]))
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        keep = f': %s; cp %s "$(mktemp {folder}/XXXXXXXX.cu)"; false'  # refused: the programs go on without it

        def run(job: tuple[str, str]) -> None:
            script, part = job
            done = subprocess.run([sys.executable, str(HERE / script), str(plugin), "emulated", part], text=True,
                                  capture_output=True, env={**os.environ, "PYTHONPATH": paths, "ONT_EMULATE_JIT": keep})
            failed = json.loads(done.stdout.splitlines()[-1])["failed"] if not done.returncode else done.stderr[-2000:]
            if failed:
                raise RuntimeError(f"{script} {part}: {failed}")

        list(pool.map(run, scripts))
        return sorted({path.read_text() for path in Path(folder).iterdir()})


def compiler_of(library: Path, folder: Path) -> tuple[Callable[[str, int], int], str]:
    """libs/nvrtc.c with that NVRTC: bytes of code of a source for an architecture, 0 where it is refused; and what is
    put in front of a source.
    """
    ctypes.CDLL(str(library))  # loaded, so that nvrtc.c finds it first
    built = folder / "nvrtc_check.so"
    subprocess.run(["cc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{ROOT}/cuda/emulate/include",
                    f"-I{ROOT}/cuda", f"-I{ROOT}/csrc", str(HERE / "nvrtc_check.c"), "-o", str(built), "-ldl"],
                   check=True)
    check = ctypes.CDLL(str(built))
    check.ont_check_preamble.restype = ctypes.c_char_p
    check.ont_check_compile.restype = ctypes.c_size_t
    check.ont_check_compile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return (lambda source, architecture: check.ont_check_compile(source.encode(), architecture),
            check.ont_check_preamble().decode())


def check_generated(library: Path, sources: Iterable[str]) -> list[str]:
    """The sources that NVRTC refuses, each with the architecture."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        size_of, preamble = compiler_of(library, Path(folder))

        def refused(job: tuple[str, int]) -> str:
            source, architecture = job
            text = source.replace(EMULATED, preamble, 1).split(FOOTER)[0]
            return "" if size_of(text, architecture) else f"sm_{architecture} refuses\n{text}"

        return list(filter(None, pool.map(refused, [(source, a) for source in sources for a in ARCHITECTURES])))


def drawn(sources: list[str], count: int) -> list[str]:
    return random.Random(drawn_seed()).sample(sources, min(count, len(sources)))


def generated(plugin: Path, count: int | None) -> list[str]:
    library = nvrtc()
    if not library:
        return ["NVRTC is not in build/nvidia: fetch nvrtc"]
    sources = generated_sources(plugin, (*PROGRAMS, *MODELS_AND_CASES))
    some = sources if count is None else drawn(sources, count)
    print(f"{len(some)} of {len(sources)} distinct generated kernels, for sm_{', sm_'.join(map(str, ARCHITECTURES))}")
    return check_generated(library, some) if sources else ["the programs generate no kernels"]


# ---- divisions ----

def machine_code(source: Path, folder: Path) -> Path:
    """What nvcc makes of it for ARCHITECTURE."""
    made = folder / f"{source.stem}.cubin"
    subprocess.run(["nvcc", "-std=c++17", "-O3", "-cubin", f"-arch=sm_{ARCHITECTURE}", f"-I{ROOT / 'cuda'}",
                    f"-I{ROOT / 'csrc'}", str(source), "-o", str(made)], check=True, capture_output=True)
    return made


def divisions(code: Path) -> dict[str, list[str]]:
    """By the kernels' names: the functions of 64-bit divisions that the linker has put behind their code."""
    sections, symbols = (subprocess.run(["readelf", option, str(code)], capture_output=True, text=True,
                                        check=True).stdout for option in ("-WS", "-Ws"))
    kernels = dict(re.findall(r"^\s*\[\s*(\d+)\] \.text\.(\S+)", sections, re.M))
    called = re.findall(r"\s(\d+) \$__internal_\d+_\$__cuda_sm\d+_((?:div|rem)_[su]64)", symbols)
    names = subprocess.run(["c++filt"], input="".join(f"{name}\n" for name in kernels.values()), text=True,
                           capture_output=True, check=True).stdout.splitlines()
    return {name.removeprefix("void "): sorted({function for at, function in called if at == section})
            for section, name in zip(kernels, names, strict=True)}


def divided_of_text(text: str) -> list[str]:
    """The functions of 64-bit divisions in a generated kernel, with the emulation's preamble."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "generated.cu"
        source.write_text(text.split(FOOTER)[0])
        (found,) = divisions(machine_code(source, Path(folder))).values()
    return found


def main(command: str, *arguments: str) -> None:
    wrong: list[str] = []
    if command == "fetch":
        for part in arguments:
            fetch(part)
    elif command == "headers":
        wrong = [check_headers(includes())] if includes() else ["the headers are not in build/nvidia: fetch headers"]
    elif command == "generated":
        script, folder = ROOT / "cuda/emulate/build.py", ROOT / "build/emulated/plain"
        built = subprocess.run([sys.executable, str(script), str(folder)], check=True, text=True,
                               capture_output=True).stdout
        wrong = generated(Path(built.splitlines()[-1]), int(arguments[0]) if arguments else None)
    else:
        raise SystemExit(__doc__)
    for line in filter(None, wrong):
        print(line)
    raise SystemExit(any(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
