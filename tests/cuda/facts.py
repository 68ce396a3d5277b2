"""What NVIDIA's toolchain says, without a GPU, of what cuda/ writes by hand, generates and compiles.

    export PYTHONPATH=tests
    python tests/cuda/facts.py fetch nvrtc|headers|nvdisasm     PyPI's wheels to build/nvidia: 58 MB, over 1 GB, 5 MB
    python tests/cuda/facts.py headers                  cuda/libs against the headers of cuBLASLt, cuDNN and NCCL
    python tests/cuda/facts.py generated [COUNT]        generated kernels through NVRTC, for each of ARCHITECTURES
    python tests/cuda/facts.py registers [--write]      kernels.tsv against what ptxas has said in the build in place
    python tests/cuda/facts.py divisions                64-bit divisions in machine code of kernels that must have none

`generated` runs programs on the emulated device and compiles COUNT of the kernels that they generate, drawn by the seed
of the tests, or all. `divisions` compiles by nvcc. `registers` needs a build with ONNXTRAIN_CUDA_ARCHS=90; --write writes the table.

Each command prints what is wrong, and ends with status 1 where something is.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from seeds import drawn_seed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build/nvidia"
BUILD = f"build/temp.*-{sys.version_info.major}{sys.version_info.minor}"  # setup.py's
WHEELS = {"nvrtc": ("nvidia-cuda-nvrtc",), "headers": ("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"),
          "nvdisasm": ("nvidia-cuda-nvdisasm",)}
ARCHITECTURES = (80, 90, 100)
TABLE = HERE / "kernels.tsv"


# ---- wheels ----

def fetch(part: str) -> None:
    """Headers and NVRTC of wheels that pip downloads; the rest of the libraries is over a gigabyte, and not needed."""
    wanted = re.compile(r"/include/|/lib/libnvrtc|/bin/nvdisasm")
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *WHEELS[part]],
                       check=True)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(FOLDER / part, [name for name in archive.namelist() if wanted.search(name)])


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

PROGRAMS = "mlp,mlp_halves,transformer,loss,groups,steps,drops,gelu_epilogues"
EMULATED = '#include "kernels/launch.cuh"\n'  # the emulation's preamble and footer: cuda/emulate/jit.c
FOOTER = '\nextern "C" __attribute__((visibility("default"))) int ont_fused_launch'


def generated_sources(plugin: Path) -> list[str]:
    """The kernels that programs and torch's dropout generate, with the emulation's preamble, in the order of their
    texts.
    """
    paths = os.pathsep.join(str(ROOT / path) for path in ("", "tests", "tests/bench", "tests/graph", "tests/ops",
                                                          "tests/optim"))
    with tempfile.TemporaryDirectory() as folder:
        keep = f': %s; cp %s "$(mktemp {folder}/XXXXXXXX.cu)"; false'  # refused: the programs go on without it
        for script, part in (("programs.py", PROGRAMS), ("dropout.py", "2/7")):
            done = subprocess.run([sys.executable, str(HERE / script), str(plugin), "emulated", part], text=True,
                                  capture_output=True, env={**os.environ, "PYTHONPATH": paths, "ONT_EMULATE_JIT": keep})
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
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
    sources = generated_sources(plugin)
    some = sources if count is None else drawn(sources, count)
    print(f"{len(some)} of {len(sources)} generated kernels for sm_{', sm_'.join(map(str, ARCHITECTURES))}")
    return check_generated(library, some) if sources else ["the programs generate no kernels"]


# ---- divisions ----

# In the source, kernels whose names begin so: each thread computes indices, by multiplications. A division of 64 bits is
# a function of some 70 instructions. The mean of integers divides each result once.
UNDIVIDED = {"copy": ("short_copy_kernel", "rotate_kernel", "copy_kernel", "transpose_kernel", "transpose_pairs_kernel"),
             "norm": ("norm_kernel", "norm_grad_kernel"),
             "reduce": ("reduce_kernel<float", "reduce_kernel<double", "reduce_kernel<ont_"),
             "elementwise": ("elementwise_kernel",)}
# What a source divides for other reasons than indices is left out: Div and Mod of integers, and PyTorch's layout of
# Dropout's numbers.
WITHOUT = {"elementwise": """#include "kernels/launch.cuh"
#include "kernels/math.cuh"
template <class T> ONT_DEVICE T ont_undivided(T a, T b, bool more = false) { return more ? a : (T)(a + b); }
#define vdiv ont_undivided
#define vmod ont_undivided
#define ont_dropout_word(random, stream, element) ((uint32_t)((random)[0] + (stream) + (uint64_t)(element)))
"""}


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


def divided(source: str, starts: tuple[str, ...]) -> list[str]:
    """The kernels of cuda/kernels/SOURCE.cu whose names begin so, and that divide 64 bits; all where there are none."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / f"{source}.cu"
        whole.write_text(f'{WITHOUT.get(source, "")}#include "kernels/{source}.cu"\n')
        found = divisions(machine_code(whole, Path(folder)))
    chosen = {start: [name for name in found if name.startswith(start)] for start in starts}
    return [*(f"{source}: no kernel is called {start}" for start, names in chosen.items() if not names),
            *(f"{name}: {', '.join(found[name])}" for names in chosen.values() for name in names if found[name])]


def divided_of_text(text: str) -> list[str]:
    """The functions of 64-bit divisions in a generated kernel, with the emulation's preamble."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "generated.cu"
        source.write_text(text.split(FOOTER)[0])
        (found,) = divisions(machine_code(source, Path(folder))).values()
    return found


# ---- registers and spills ----

ARCHITECTURE = 90  # of the table


class Kernel(NamedTuple):
    """The most of all instances of one kernel function."""
    instances: int
    registers: int
    spilled: int  # bytes
    shared: int  # bytes that are not dynamic

    def joined(self, other: Kernel) -> Kernel:
        return Kernel(self.instances + other.instances, *map(max, self[1:], other[1:]))


def warps(registers: int) -> int:
    """Of a multiprocessor of 65,536 registers, which are given to a warp in units of 256."""
    return min(64, 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4)


def read_logs(logs: Iterable[Path]) -> dict[str, Kernel]:
    """By the kernels' names, for ARCHITECTURE."""
    entry = re.compile(rf"Compiling entry function '(\w+)' for 'sm_{ARCHITECTURE}'(.*?)(?=Compiling entry|\Z)", re.S)
    kernels: dict[str, Kernel] = {}
    for log in logs:
        found = entry.findall(log.read_text())
        names = subprocess.run(["c++filt"], input="".join(f"{name}\n" for name, _ in found), text=True,
                               capture_output=True, check=True).stdout.splitlines()
        for name, (_, text) in zip(names, found, strict=True):
            used = re.search(r"Used (\d+) registers", text)
            spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text)))
            shared = sum(map(int, re.findall(r"(\d+) bytes smem", text)))
            plain = re.match(r"[:\w]*", re.sub(r"^void |\(anonymous namespace\)::|_INTERNAL_\w+::", "", name))
            kernel = Kernel(1, int(used[1]) if used else 0, spilled, shared)
            key = f"{log.stem.split('.')[0]}:{plain[0] if plain else name}"
            kernels[key] = kernels[key].joined(kernel) if key in kernels else kernel
    return kernels


def read_table(path: Path = TABLE) -> dict[str, Kernel]:
    lines = [line.split("\t") for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name: Kernel(*map(int, numbers)) for name, *numbers in lines[1:]}


def write_table(kernels: dict[str, Kernel], path: Path = TABLE) -> None:
    rows = ["\t".join(("kernel", *Kernel._fields))]
    rows += ["\t".join((name, *map(str, kernel))) for name, kernel in sorted(kernels.items())]
    title = f"# The most of all instances, by ptxas for sm_{ARCHITECTURE}; made by facts.py registers --write"
    path.write_text("".join(f"{row}\n" for row in (title, *rows)))


def check_kernels(found: dict[str, Kernel], known: dict[str, Kernel]) -> list[str]:
    """Kernels with more spills, or with so many more registers that fewer warps fit a multiprocessor."""
    wrong = [f"{name}: only one of table and build has it; write {TABLE.name} again"
             for name in sorted(found.keys() ^ known.keys())]
    for name in sorted(found.keys() & known.keys()):
        new, old = found[name], known[name]
        if new.spilled > old.spilled:
            wrong.append(f"{name}: {new.spilled} bytes of spills, before {old.spilled}")
        if warps(new.registers) < warps(old.registers):
            wrong.append(f"{name}: {new.registers} registers leave room for {warps(new.registers)} warps, before "
                         f"{old.registers} for {warps(old.registers)}")
    return wrong


def registers(write: bool) -> list[str]:
    found = read_logs(sorted(ROOT.glob(f"{BUILD}/cuda/kernels/*.ptxas")))
    if not found:
        return [f"the build in place has no kernels for sm_{ARCHITECTURE}"]
    if write:
        write_table(found)
    print(f"{sum(kernel.instances for kernel in found.values())} instances of {len(found)} kernels")
    return check_kernels(found, read_table())


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
    elif command == "divisions":
        wrong = [line for source, starts in UNDIVIDED.items() for line in divided(source, starts)]
    elif command == "registers":
        wrong = registers("--write" in arguments)
    else:
        raise SystemExit(__doc__)
    for line in filter(None, wrong):
        print(line)
    raise SystemExit(any(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
