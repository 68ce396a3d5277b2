"""Builds onnxtrain._C: one abi3 extension from csrc/, compiled incrementally and once per ISA where that matters.

Environment: CC; ONNXTRAIN_SANITIZE=address,undefined; ONNXTRAIN_DEBUG=1 (-O1 -g, passes verified); ONNXTRAIN_CUDA=0|1|auto
with CUDA_HOME, CUDNN_HOME, CUDACXX; ONNXTRAIN_JOBS.
"""

from __future__ import annotations

import concurrent.futures
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
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

VERSION = "0.1.0"
# One object per entry from each csrc/simd/*.inc.c; simd.c chooses among them at run time.
ISAS = {
    "plain": ["-DONT_ISA_PLAIN=1"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c",
               "-mprefer-vector-width=512"],
}


class BuildCore(build_ext):
    """Compiles csrc/ with per-file flags; setuptools' own compiler class has one set of flags per extension."""

    def build_extension(self, ext: Extension) -> None:
        temp = Path(self.build_temp).resolve()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        temp.mkdir(parents=True, exist_ok=True)
        compiler, protobuf_library = dependencies.protobuf_c()
        generated = self.generate_proto(compiler, temp)
        include, dnnl, dnnl_licence = dependencies.onednn()
        flags = self.flags(generated.parent, include)
        jobs = [(source, temp / source.relative_to(ROOT).with_suffix(".o"), []) for source in self.sources()]
        for source in sorted((ROOT / "csrc/simd").glob("*.inc.c")):
            for isa, options in ISAS.items():
                jobs.append((source, temp / "simd" / f"{source.name}.{isa}.o", [*options, f"-DONT_ISA={isa}"]))
        jobs.append((generated, temp / "onnx-ml.pb-c.o", ["-w"]))
        self.compile_all(jobs, flags)
        self.link([str(job[1]) for job in jobs], protobuf_library, target)
        self.bundle(target.parent / "_libs", protobuf_library, dnnl, dnnl_licence)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "onnxtrain/_libs"
        if built.exists():
            shutil.copytree(built, ROOT / "onnxtrain/_libs", dirs_exist_ok=True)

    def sources(self) -> list[Path]:
        return sorted(p for p in (ROOT / "csrc").rglob("*.c") if not p.name.endswith(".inc.c") and "dist" not in p.parts)

    def generate_proto(self, compiler: str, temp: Path) -> Path:
        proto = dependencies.onnx_proto()
        out = temp / "proto"
        result = out / "onnx-ml.pb-c.c"
        if not result.exists() or result.stat().st_mtime < proto.stat().st_mtime:
            out.mkdir(exist_ok=True)
            subprocess.run([compiler, f"--proto_path={proto.parent}", f"--c_out={out}", proto.name], check=True)
        return result

    def flags(self, *includes: Path) -> list[str]:
        flags = ["-std=c11", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fwrapv",
                 "-Wall", "-Wextra", "-Werror", "-g1", f'-DONT_VERSION="{VERSION}"', "-D_GNU_SOURCE",
                 "-DPy_LIMITED_API=0x030B0000", f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_paths()['include']}"]
        flags += [f"-isystem{path}" for path in includes]
        sanitize = os.environ.get("ONNXTRAIN_SANITIZE")
        debug = os.environ.get("ONNXTRAIN_DEBUG") == "1" or bool(sanitize)
        flags += ["-O1", "-g"] if debug else ["-O3", "-DNDEBUG"]
        if sanitize:
            flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]
        return flags

    def compile_all(self, jobs: list[tuple[Path, Path, list[str]]], flags: list[str]) -> None:
        cc = shlex.split(os.environ.get("CC", "cc"))
        newest_header = max(p.stat().st_mtime for p in [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.def")])
        stamp = Path(self.build_temp) / "flags"
        same_flags = stamp.exists() and stamp.read_text() == " ".join(cc + flags)

        def compile_one(job: tuple[Path, Path, list[str]]) -> None:
            source, target, extra = job
            newest = max(source.stat().st_mtime, newest_header, Path(__file__).stat().st_mtime)
            if same_flags and not self.force and target.exists() and target.stat().st_mtime > newest:
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([*cc, *flags, *extra, "-c", str(source), "-o", str(target)], check=True)

        workers = int(os.environ.get("ONNXTRAIN_JOBS", os.cpu_count() or 1))
        stamp.unlink(missing_ok=True)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            try:
                list(pool.map(compile_one, jobs))
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"onnxtrain: compiling {error.cmd[-3]} failed") from None
        stamp.write_text(" ".join(cc + flags))

    def link(self, objects: list[str], protobuf_library: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        sanitize = os.environ.get("ONNXTRAIN_SANITIZE")
        cc = shlex.split(os.environ.get("CC", "cc"))
        fresh = target.with_name(target.name + ".new")
        subprocess.run(
            [*cc, "-shared", "-fopenmp", "-Wl,-z,defs", "-Wl,--allow-shlib-undefined", "-Wl,-rpath,$ORIGIN/_libs", *objects,
             "-o", str(fresh), str(protobuf_library), "-ldl", "-lm", "-lpthread",
             *([f"-fsanitize={sanitize}"] if sanitize else []), "-Wl,--unresolved-symbols=ignore-all"],
            check=True)
        fresh.replace(target)

    def bundle(self, libs: Path, protobuf_library: Path, dnnl: Path, dnnl_licence: Path) -> None:
        """Copies the shared libraries beside the extension, with their licence texts."""
        libs.mkdir(exist_ok=True)
        wanted = {"libprotobuf-c.so.1": protobuf_library, "libdnnl.so.3": dnnl, "LICENSE.oneDNN": dnnl_licence}
        notice = Path("/usr/share/doc/libprotobuf-c1/copyright")
        if notice.exists():
            wanted["LICENSE.protobuf-c"] = notice
        for name, source in wanted.items():
            copy = libs / name
            if not copy.exists() or copy.stat().st_size != source.stat().st_size:
                fresh = libs / (name + ".new")
                shutil.copyfile(source, fresh)
                fresh.replace(copy)


class Abi3Wheel(bdist_wheel):
    """One wheel for every GIL build of CPython from 3.11 on."""

    def get_tag(self) -> tuple[str, str, str]:
        return "cp311", "abi3", super().get_tag()[2]


setup(
    version=VERSION,
    ext_modules=[Extension("onnxtrain._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": Abi3Wheel},
)
