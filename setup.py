"""Builds onnxtrain._C: one abi3 extension from csrc/, compiled incrementally and once per ISA where that matters.

Environment: CC, which also says for which processor; ONNXTRAIN_PYTHON_INCLUDE, the folder of Python.h in a cross-build
(tests/aarch64.sh); ONNXTRAIN_SANITIZE=address,undefined (a build directory of its own; LD_PRELOAD of libasan to run);
ONNXTRAIN_DEBUG=1 (-O1 -g; graphs, plans and pools are verified); ONNXTRAIN_WERROR=0|1; ONNXTRAIN_JOBS;
ONNXTRAIN_CUDA=0|1|auto with CUDA_HOME, CUDACXX and ONNXTRAIN_CUDA_ARCHS ("80 90 100"); ONNXTRAIN_MPI=0|1|auto with
MPICC, or MPI_CXX_INCLUDE_PATH for CC. auto, the default of MPI, builds what it can and says what it leaves out; 1
fails instead; 0, the default of CUDA, which takes minutes, builds nothing of the part.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "third_party"))
import dependencies  # noqa: E402

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
PLUGINS = ("_cuda.so", "_mpi.so")  # opened by _C at run time, never linked to it
# One object per entry of a machine from each csrc/simd/*.inc.c; simd.c chooses among them at run time. Machines that
# are not listed have the plain one. NEON is part of every aarch64: csrc/simd has generic vectors, which the compiler
# expresses by it.
ISAS = {  # a literal, which tests/unit reads
    "x86_64": {
        "plain": ["-DONT_ISA_PLAIN=1"],
        "avx2": ["-mavx2", "-mfma", "-mf16c", "-ffp-contract=fast"],
        "avx512": ["-ffp-contract=fast", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma",
                   "-mf16c", "-mprefer-vector-width=512"],
    },
    "aarch64": {
        "plain": ["-DONT_ISA_PLAIN=1"],
        "neon": ["-ffp-contract=fast"],
    },
}
PLAIN = {"plain": ISAS["x86_64"]["plain"]}
# Warnings of a compiler that nobody has tried must not keep a user from building a source distribution.
WERROR = ["-Werror"] if os.environ.get("ONNXTRAIN_WERROR", str(int(not (ROOT / "PKG-INFO").exists()))) == "1" else []


def compile_one(command: list[str], log: Path | None = None) -> None:
    """Runs a compiler, through ccache where that is installed: a wheel is built of a copy of the tree.

    What ptxas says of each kernel goes to the log, which tests/cuda/facts.py reads; any other message is printed.
    """
    ccache = shutil.which("ccache")
    done = subprocess.run([ccache, *command] if ccache else command, stderr=subprocess.PIPE if log else None, text=True,
                          env={**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"})
    if log:
        log.write_text(done.stderr)
        known = re.compile(r"ptxas info|    \d+ bytes stack frame")
        sys.stderr.writelines(f"{line}\n" for line in done.stderr.splitlines() if not known.match(line))
    done.check_returncode()


def mpi_sources() -> list[Path]:
    """What calls MPI is a library of its own, so that _C needs none."""
    return sorted((ROOT / "csrc/dist").glob("mpi*.c"))


def python_include() -> str:
    return os.environ.get("ONNXTRAIN_PYTHON_INCLUDE") or sysconfig.get_paths()["include"]


def newest_of(depfile: Path) -> float:
    """The newest prerequisite in the compiler's make rule; infinite where one is gone or there is no rule."""
    try:
        names = depfile.read_text().split(":", 1)[1].replace("\\\n", " ").split()
        return max(Path(name).stat().st_mtime for name in names)
    except (OSError, IndexError, ValueError):
        return float("inf")


def replace_file(source: Path | str, target: Path | str) -> None:
    """Copies by renaming: a process that has the old file mapped keeps it; writing over it would end that process."""
    fresh = Path(f"{target}.new")
    shutil.copyfile(source, fresh)
    fresh.replace(target)


class BuildCore(build_ext):
    """Compiles csrc/ with per-file flags; setuptools' own compiler class has one set of flags per extension."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.in_place = bool(self.inplace)  # build_ext.run() sets inplace to 0 while it builds

    def build_extension(self, ext: Extension) -> None:
        temp = Path(self.build_temp).resolve()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        temp.mkdir(parents=True, exist_ok=True)
        compiler, protobuf_library = dependencies.protobuf_c()
        generated = self.generate_proto(compiler, temp)
        onednn = dependencies.onednn()
        flags = self.flags(generated.parent, *(onednn[:1] if onednn else ()))
        sources = self.sources(bool(onednn))
        jobs = [(source, temp / source.relative_to(ROOT).with_suffix(".o"), []) for source in sources]
        for source in sorted((ROOT / "csrc/simd").rglob("*.inc.c")):
            for isa, options in ISAS.get(dependencies.machine(), PLAIN).items():
                jobs.append((source, temp / "simd" / f"{source.name}.{isa}.o", [*options, f"-DONT_ISA={isa}"]))
        jobs.append((generated, temp / "onnx-ml.pb-c.o", ["-w"]))
        self.compile_all(jobs, flags)
        self.link([str(job[1]) for job in jobs], protobuf_library, target)
        self.bundle(target.parent / "_libs", {
            "libprotobuf-c.so.1": protobuf_library, "LICENSE.protobuf-c": dependencies.protobuf_c_licence(),
            **({"libdnnl.so.3": onednn[1], "LICENSE.oneDNN": onednn[2]} if onednn else {}),
            "LICENSE.onnx": dependencies.onnx_licence()})
        self.build_cuda(temp, target.parent)
        self.build_mpi(target.parent)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "onnxtrain"
        if (built / "_libs").exists():
            shutil.copytree(built / "_libs", ROOT / "onnxtrain/_libs", dirs_exist_ok=True, copy_function=replace_file)
        for plugin in PLUGINS:
            if (built / plugin).exists():
                replace_file(built / plugin, ROOT / "onnxtrain" / plugin)

    def sources(self, onednn: bool) -> list[Path]:
        device = ROOT / "csrc/device"
        left_out = {*mpi_sources(), *(device / name for name in
                                      (["onednn_absent.c"] if onednn else ["conv.c", "matmul.c"]))}
        everything = (ROOT / "csrc").rglob("*.c")
        return sorted(p for p in everything if not p.name.endswith(".inc.c") and p not in left_out)

    def generate_proto(self, compiler: str, temp: Path) -> Path:
        proto = dependencies.onnx_proto()
        out = temp / "proto"
        result = out / "onnx-ml.pb-c.c"
        if not result.exists() or result.stat().st_mtime < proto.stat().st_mtime:
            out.mkdir(exist_ok=True)
            subprocess.run([compiler, f"--proto_path={proto.parent}", f"--c_out={out}", proto.name], check=True)
        return result

    def flags(self, *includes: Path) -> list[str]:
        flags = ["-std=c11", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
                 "-fwrapv", "-ffp-contract=off", "-Wall", "-Wextra", "-Wpointer-arith", *WERROR, "-g1",
                 f'-DONT_VERSION="{VERSION}"', "-D_GNU_SOURCE",
                 "-DPy_LIMITED_API=0x030B0000", f"-I{ROOT / 'csrc'}", f"-I{python_include()}"]
        if dependencies.is_clang():  # it has other opinions, and none of GCC's pragmas for loops
            flags += ["-Wno-bitwise-conditional-parentheses", "-Wno-unknown-pragmas", "-Wno-pass-failed",
                      "-Wno-unneeded-internal-declaration"]  # what an assertion alone calls
        if dependencies.machine() != "x86_64":  # char is unsigned on some; PyPI's oneDNN is for x86 alone
            flags += ["-fsigned-char", "-DONT_NO_ONEDNN=1"]
        for path in includes:
            flags += ["-isystem", str(path)]  # in one word, ccache would tell two paths apart
        sanitize = os.environ.get("ONNXTRAIN_SANITIZE")
        debug = os.environ.get("ONNXTRAIN_DEBUG") == "1" or bool(sanitize)
        flags += ["-O1"] if debug else ["-O3", "-DNDEBUG"]
        if debug and not sanitize:  # a sanitizer's report needs lines alone; variables double what a build takes
            flags.append("-g")
        if sanitize:
            flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]
        return flags

    def compile_all(self, jobs: list[tuple[Path, Path, list[str]]], flags: list[str]) -> None:
        cc = dependencies.c_compiler()
        stamp = Path(self.build_temp) / "flags"
        command = " ".join(cc + flags) + repr(ISAS)
        if not stamp.exists() or stamp.read_text() != command:
            for _, target, _ in jobs:
                target.unlink(missing_ok=True)
            stamp.write_text(command)
        commands = {target: [*cc, *flags, *extra, "-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o",
                             str(target)] for source, target, extra in jobs}
        if self.in_place:  # for clangd and clang-tidy
            (ROOT / "build/compile_commands.json").write_text(json.dumps(
                [{"directory": str(ROOT), "file": str(source), "arguments": commands[target]}
                 for source, target, _ in jobs], indent=1))

        def compile_job(job: tuple[Path, Path, list[str]]) -> None:
            _, target, _ = job
            if not self.force and target.exists() and target.stat().st_mtime > newest_of(target.with_suffix(".d")):
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            compile_one(commands[target])

        workers = int(os.environ.get("ONNXTRAIN_JOBS", os.cpu_count() or 1))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            try:
                list(pool.map(compile_job, jobs))
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"onnxtrain: compiling {error.cmd[-3]} failed") from None

    def link(self, objects: list[str], protobuf_library: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        sanitize = os.environ.get("ONNXTRAIN_SANITIZE")
        cc = dependencies.c_compiler()
        fresh = target.with_name(target.name + ".new")
        subprocess.run(
            [*cc, "-shared", "-fopenmp", "-Wl,-rpath,$ORIGIN/_libs", *objects, "-o", str(fresh), str(protobuf_library),
             "-ldl", "-lm", "-lpthread", *([f"-fsanitize={sanitize}"] if sanitize else [])],
            check=True)
        # Python's symbols come from the process, so the linker cannot be asked for completeness: ours are checked here.
        symbols = subprocess.run(["nm", "-D", "--undefined-only", str(fresh)], capture_output=True, text=True,
                                 check=True)
        names = {line.split()[-1] for line in symbols.stdout.splitlines()}
        missing = sorted(name for name in names if name.startswith("ont_"))
        if missing:
            raise SystemExit(f"onnxtrain: declared, but defined nowhere in csrc/: {', '.join(missing)}")
        fresh.replace(target)

    def bundle(self, libs: Path, wanted: dict[str, Path]) -> None:
        """Copies the shared libraries beside the extension, with their licence texts."""
        libs.mkdir(exist_ok=True)
        for name, source in wanted.items():
            copy = libs / name
            if not copy.exists() or copy.stat().st_size != source.stat().st_size:
                replace_file(source, copy)

    def leave_out(self, variable: str, reason: str) -> None:
        """Ends the build where the variable asks for this part, and says so otherwise."""
        if os.environ.get(variable, "auto") == "1":
            raise SystemExit(f"onnxtrain: {variable}=1, but {reason}")
        print(f"onnxtrain: {reason}: built without ({variable}=1 makes this an error)", file=sys.stderr)

    def build_cuda(self, temp: Path, package: Path) -> None:
        """cuda/ to _cuda.so: kernels by nvcc, the rest by the C compiler.

        The CUDA runtime is linked in, libraries are opened at run time.
        """
        compiler, home = dependencies.nvcc(), dependencies.cuda_home()
        if os.environ.get("ONNXTRAIN_CUDA", "0") == "0":
            (package / "_cuda.so").unlink(missing_ok=True)  # of an earlier build
            return
        if not compiler or not home:
            return self.leave_out("ONNXTRAIN_CUDA", "nvcc or the CUDA runtime is not found (CUDACXX, CUDA_HOME)")
        if dependencies.cuda_version(home) < dependencies.LEAST_CUDA:
            return self.leave_out("ONNXTRAIN_CUDA", dependencies.cuda_is_too_old(home))
        includes = [f"-I{ROOT / 'cuda'}", f"-I{ROOT / 'csrc'}"]
        cc = [*dependencies.c_compiler(), "-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall",
              "-Wextra", "-Werror", "-D_GNU_SOURCE", f'-DONT_MATH_PATH="{ROOT}/cuda/kernels/math.cuh"', *includes,
              f'-DONT_CUDA_ARCHS="{" ".join(self.cuda_architectures())}"', "-isystem", str(home / "include")]
        nvcc = [compiler, "-std=c++17", "-O3", *self.cuda_code(), "-Werror", "all-warnings",
                "-Xptxas=-v", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", *includes]
        jobs = [(source, temp / f"{source.relative_to(ROOT)}.o", nvcc if source.suffix == ".cu" else cc)
                for folder in ("", "kernels", "libs", "ops") for source in sorted((ROOT / "cuda" / folder).glob("*.c*"))
                if source.suffix in (".c", ".cu")]
        for _, target, _ in jobs:
            target.parent.mkdir(parents=True, exist_ok=True)
        self.compile_plugin(jobs)
        fresh = package / "_cuda.so.new"
        subprocess.run([compiler, "-shared", "-cudart=static", *(str(job[1]) for job in jobs), "-o", str(fresh), "-ldl",
                        "-lpthread"], check=True)
        fresh.replace(package / "_cuda.so")

    def cuda_architectures(self) -> list[str]:
        """ONNXTRAIN_CUDA_ARCHS ("80 90 100"). A build in place has one, so that it is quick."""
        quick = self.in_place or os.environ.get("ONNXTRAIN_SANITIZE")
        return os.environ.get("ONNXTRAIN_CUDA_ARCHS", "80" if quick else "80 90 100").split()

    def cuda_code(self) -> list[str]:
        """nvcc's options: each architecture as machine code, the last one as PTX too."""
        named = self.cuda_architectures()
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in named]
        return [*codes, f"-gencode=arch=compute_{named[-1]},code=compute_{named[-1]}"]

    def compile_plugin(self, jobs: list[tuple[Path, Path, list[str]]]) -> None:
        def compile_job(job: tuple[Path, Path, list[str]]) -> None:
            source, target, command = job
            rule, stamp = target.with_suffix(".d"), target.with_suffix(".command")
            known = stamp.exists() and stamp.read_text() == " ".join(command)
            if not self.force and known and target.exists() and target.stat().st_mtime > newest_of(rule):
                return
            stamp.unlink(missing_ok=True)  # a build that is interrupted leaves an object of other options
            compile_one([*command, "-MMD", "-MF", str(rule), "-c", str(source), "-o", str(target)],
                        target.with_suffix(".ptxas") if source.suffix == ".cu" else None)
            stamp.write_text(" ".join(command))

        workers = int(os.environ.get("ONNXTRAIN_JOBS", os.cpu_count() or 1))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            try:
                list(pool.map(compile_job, jobs))
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"onnxtrain: compiling {error.cmd[-3]} failed") from None

    def build_mpi(self, package: Path) -> None:
        """csrc/dist/mpi*.c to _mpi.so, by mpicc, or by CC where MPI_CXX_INCLUDE_PATH says where mpi.h is."""
        command = dependencies.mpi()
        if os.environ.get("ONNXTRAIN_MPI", "auto") == "0":
            (package / "_mpi.so").unlink(missing_ok=True)  # of an earlier build
            return
        if not command:
            return self.leave_out("ONNXTRAIN_MPI", "mpicc is not found (MPICC, MPI_CXX_INCLUDE_PATH)")
        cc, libraries = command
        fresh = package / "_mpi.so.new"
        flags = ["-shared", "-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror",
                 "-D_GNU_SOURCE", f"-I{ROOT / 'csrc'}"]
        subprocess.run([*cc, *flags, *map(str, mpi_sources()), "-o", str(fresh), *libraries, "-lpthread"], check=True)
        fresh.replace(package / "_mpi.so")


class Abi3Wheel(bdist_wheel):
    """One wheel for every GIL build of CPython from 3.11 on."""

    def get_tag(self) -> tuple[str, str, str]:
        return "cp311", "abi3", super().get_tag()[2]


# Extension.depends is what puts them into a source distribution.
SDIST = [str(p.relative_to(ROOT))
         for folder in ("csrc", "cuda", "third_party") for p in sorted((ROOT / folder).rglob("*"))
         if p.suffix in {".c", ".cc", ".h", ".def", ".cu", ".cuh", ".py", ".md"}]

setup(
    ext_modules=[Extension("onnxtrain._C", sources=[], depends=SDIST, py_limited_api=True)],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": Abi3Wheel},
)
