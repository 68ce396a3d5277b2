"""What ptxas and nvdisasm say, without a GPU, of the kernels of the build in place (ONNXTRAIN_CUDA_ARCHS=90).

    python tests/cuda/facts.py fetch disassembler   wheels of PyPI, to build/nvidia: 6 MB
    python tests/cuda/sass.py [--write]             kernels.tsv and loops.tsv against the build; --write writes them

kernels.tsv has every kernel function. Registers, spills, shared memory (dynamic too, see DYNAMIC) and threads (launch
bounds) are the most of all instances, warps on a multiprocessor the least. all_warps and the counts of instructions are
sums over instances, with the functions that a kernel calls. Spills, accesses of local memory, conversions and calls of
64-bit divisions may not become more; warps, tensor-core instructions, asynchronous copies and accesses of 16 bytes not
fewer. Another nvcc unrolls loops otherwise: instructions are compared only where the table is of the same one. Without
nvdisasm and cuobjdump, registers and spills alone are compared.

loops.tsv has the loops in which kernels of attention spend their time. A loop is the smallest that has all tensor-core
instructions of its kernel. Of the ways through it that one is counted which has the most products, exponentials and
copies to shared memory, and of those the shortest: all is computed, and nothing is masked or dropped. Loops within it
count as one pass.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from facts import ARCHITECTURE, FOLDER, ROOT

KERNELS, LOOPS_TABLE = (Path(__file__).with_name(name) for name in ("kernels.tsv", "loops.tsv"))
BUILD = f"build/temp.*-{sys.version_info.major}{sys.version_info.minor}/cuda/kernels"  # setup.py's
# In the table; the demangled name begins with; scores of a warp in one pass.
LOOPS = {
    "flash_mma_kernel<64>": ("flash_mma_kernel<ont_bf16, 64,", 32 * 32),
    "flash_mma_dq_kernel<64>": ("flash_mma_dq_kernel<ont_bf16, 64,", 16 * 64),
    "flash_mma_dkv_kernel<64>": ("flash_mma_dkv_kernel<ont_bf16, 64,", 16 * 64),
    "flash_mma_kernel<128>": ("flash_mma_kernel<ont_bf16, 128,", 16 * 64),
    "flash_mma_dq_kernel<128>": ("flash_mma_dq_kernel<ont_bf16, 128,", 16 * 32),
    "flash_mma_dkv_kernel<128>": ("flash_mma_dkv_kernel<ont_bf16, 128,", 16 * 32),
}
LABEL = re.compile(r"^(\.\w+):")
FUNCTION = re.compile(r"^\.text\.(\S+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
TARGET = re.compile(r"`\((\.\w+)\)")
CONVERSIONS = ("F2F", "F2I", "I2F")
LOCAL = ("LDL", "STL")


class Loop(NamedTuple):
    """Of one pass of one warp. `shared`: accesses of shared memory, in units of 128 bytes."""
    scores: int
    instructions: int
    hmma: int
    mufu: int
    conversions: int
    shared: int
    global16: int  # accesses of global memory, 16 bytes for each thread
    local: int  # spills


# Cycles of a multiprocessor for one: four schedulers issue one instruction each; m16n8k16 is 4096 FLOP, of which a
# multiprocessor does 4096 a cycle, but 0.63 of that by mma.sync (Luo et al., Hopper by microbenchmarking, 2024); 16
# special functions and 64 conversions a cycle (CUDA programming guide, compute capability 9.0); 128 bytes of shared
# memory a cycle.
CYCLES = {"instructions": 1 / 4, "hmma": 1 / 0.63, "mufu": 32 / 16, "conversions": 32 / 64, "shared": 1.0}


def cycles(loop: Loop) -> float:
    """Of the unit that is busy longest."""
    return max(getattr(loop, unit) * each for unit, each in CYCLES.items())


# ---- a kernel's instructions ----

class Code(NamedTuple):
    text: list[tuple[str, str, str]]  # predicate, operation and operands
    labels: dict[str, int]


def kernels_of(listing: str) -> dict[str, Code]:
    """By their names in the cubin."""
    found: dict[str, Code] = {}
    code = Code([], {})
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            code = found[match[1]] = Code([], {})
        elif match := LABEL.match(line):
            code.labels[match[1]] = len(code.text)
        elif match := INSTRUCTION.match(line):
            code.text.append(((match[1] or "").strip(), match[2], match[3]))
    return found


def next_of(code: Code, at: int, joins: dict[int, str]) -> list[int]:
    """Where the program may go on. `joins`: where branches meet again, by the places of BSYNC."""
    predicate, operation, operands = code.text[at]
    name, target = operation.split(".")[0], TARGET.search(operands)
    label = target[1] if name == "BRA" and target else joins.get(at)
    is_conditional = bool(predicate) or "P" in operands.split("`")[0]
    if label in code.labels:
        return [code.labels[label], at + 1] if is_conditional else [code.labels[label]]
    if name in ("EXIT", "RET", "BRX", "KILL") and not is_conditional:
        return []
    return [at + 1]


def joins_of(code: Code) -> dict[int, str]:
    """By BSYNC: the place that the last BSSY before it in the text gives for its barrier register."""
    places: dict[str, str] = {}
    found = {}
    for at, (_, operation, operands) in enumerate(code.text):
        register = operands.split(",")[0].strip()
        if operation.startswith("BSSY"):
            places[register] = TARGET.search(operands)[1]
        elif operation.startswith("BSYNC") and register in places:
            found[at] = places[register]
    return found


def usual_way(code: Code, first: int, last: int) -> list[int]:
    """From `first` to the branch at `last`: the most work, and of such ways the fewest instructions."""
    joins = joins_of(code)
    reached: dict[int, tuple[int, int, int]] = {first: (0, 0, -1)}  # less is better; and where from
    for at in range(first, last):
        if at not in reached:
            continue
        work, length, _ = reached[at]
        more = (work - code.text[at][1].startswith(("HMMA", "MUFU.EX2", "LDGSTS")), length + 1)
        for to in next_of(code, at, joins):
            if at < to <= last and (to not in reached or more < reached[to][:2]):
                reached[to] = (*more, at)
    if last not in reached:
        raise ValueError("no way through the loop")
    way = [last]
    while way[-1] != first:
        way.append(reached[way[-1]][2])
    return way[::-1]


def loops(code: Code) -> list[tuple[int, int]]:
    """First instruction and branch back, the smallest first."""
    found = []
    for at, (_, operation, operands) in enumerate(code.text):
        target = TARGET.search(operands)
        if operation.split(".")[0] == "BRA" and target and code.labels.get(target[1], at) < at:
            found.append((code.labels[target[1]], at))
    return sorted(found, key=lambda loop: loop[1] - loop[0])


def units(operation: str) -> int:
    """Of 128 bytes for a warp, of an access to shared memory."""
    if operation.startswith("LDSM"):
        return int(operation.rsplit(".", 1)[1]) if operation.rsplit(".", 1)[1].isdigit() else 1
    return 4 if ".128" in operation else 2 if ".64" in operation else 1


def count(code: Code, scores: int) -> Loop:
    """Of the loop that has all tensor-core instructions."""
    total = sum(operation.startswith("HMMA") for _, operation, _ in code.text)
    for first, last in loops(code):
        inside = [operation for _, operation, _ in code.text[first:last + 1]]
        if total and sum(name.startswith("HMMA") for name in inside) == total:
            way = [code.text[at][1] for at in usual_way(code, first, last)]
            named = lambda *starts: [name for name in way if name.startswith(starts)]  # noqa: E731
            return Loop(scores, len(way), len(named("HMMA")), len(named("MUFU")), len(named(*CONVERSIONS)),
                        sum(map(units, named("LDS", "STS"))),
                        sum(".128" in name for name in named("LDG", "STG", "LDGSTS")), len(named(*LOCAL)))
    raise ValueError("no loop has all tensor-core instructions")


# ---- the build ----

class Instance(NamedTuple):
    """Of a kernel, what ptxas says."""
    name: str  # demangled, with template arguments
    registers: int
    spilled: int  # bytes
    shared: int  # bytes, not dynamic


def demangled(names: Iterable[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="".join(f"{name}\n" for name in names), text=True, capture_output=True,
                          check=True)
    return [re.sub(r"^void |\(anonymous namespace\)::|_INTERNAL_\w+::", "", line) for line in done.stdout.splitlines()]


def read_logs(logs: Iterable[Path]) -> dict[tuple[str, str], Instance]:
    """By file and name in the cubin, for ARCHITECTURE."""
    entry = re.compile(rf"Compiling entry function '(\w+)' for 'sm_{ARCHITECTURE}'(.*?)(?=Compiling entry|\Z)", re.S)
    found = {(log.name.split(".")[0], name): text for log in logs for name, text in entry.findall(log.read_text())}
    instances = {}
    for (key, text), name in zip(found.items(), demangled(name for _, name in found), strict=True):
        used = re.search(r"Used (\d+) registers", text)
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text)))
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", text)))
        instances[key] = Instance(name, int(used[1]) if used else 0, spilled, shared)
    return instances


def tool(name: str) -> Path | None:
    return next(iter(sorted((FOLDER / "disassembler").rglob(f"bin/{name}"))), None)


def listing(compiled: Path) -> tuple[str, str]:
    """What nvdisasm prints of the machine code in an object file, and the version of its compiler."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([str(tool("cuobjdump")), "-xelf", f"sm_{ARCHITECTURE}.", str(compiled.resolve())], cwd=folder,
                       check=True, capture_output=True)
        (cubin,) = Path(folder).iterdir()
        text = subprocess.run([str(tool("nvdisasm")), str(cubin)], check=True, capture_output=True, text=True).stdout
        return text, re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", cubin.read_bytes())[1].decode()


def threads_of(text: str) -> dict[str, int]:
    """Launch bounds, by the kernels' names in the cubin."""
    part = re.compile(r"^//-+ \.nv\.info\.(\S+) +-+$(.*?)(?=^//-{9}|\Z)", re.M | re.S)
    bound = re.compile(r"EIATTR_MAX_THREADS\n.*?" + 3 * r"\.word\s+(0x\w+)\s.*?", re.S)
    return {name: math.prod(int(size, 16) for size in found.groups())
            for name, body in part.findall(text) if (found := bound.search(body))}


# ---- kernels ----

# Bytes of dynamic shared memory that a launcher asks for, by the size of a float and the numbers among an instance's
# template arguments; in flash.cu, for the largest heads of the instance. test_sass.py compares them with launches.
DYNAMIC: dict[str, Callable[..., int]] = {
    "flash_mma:flash_mma_kernel": lambda z, size, rows, keys: (64 * rows + 4 * keys) * (size + 8) * 2,
    "flash_mma_grad:flash_mma_dq_kernel": lambda z, size, keys: (128 + 4 * keys) * (size + 8) * 2,
    "flash_mma_grad:flash_mma_dkv_kernel": lambda z, size, queries: (128 + 4 * queries) * (size + 8) * 2,
    "flash:flash_kernel": lambda z, columns: (3 * 32 * (32 * columns + 4) + 32 * 36) * z,
    "flash:flash_dq_kernel": lambda z, columns: (4 * 32 * (32 * columns + 4) + 32 * 36) * z,
    "flash:flash_dkv_kernel": lambda z, columns: (4 * 32 * (32 * columns + 4) + 32 * 36) * z,
}


def dynamic_of(key: str, name: str) -> int:
    arguments = re.findall(r"<(.*?)>", name)[:1]
    numbers = [int(text) for text in re.findall(r"\b\d+\b", "".join(arguments))]
    return DYNAMIC[key](8 if "double" in name else 4, *numbers) if key in DYNAMIC else 0


def warps(registers: int, threads: int = 128, shared: int = 0) -> int:
    """Of a multiprocessor: 64 in at most 32 blocks; 65,536 registers, which are given to a warp in units of 256; 228 KB
    of shared memory, of which a block takes 1 KB for itself, in units of 128 bytes.
    """
    each = -(-threads // 32)
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4
    by_shared = (228 << 10) // (-(-shared // 128) * 128 + 1024)
    return each * min(32, 64 // each, by_registers // each, by_shared)


class Kernel(NamedTuple):
    """Of all instances of one kernel function: how many, the most of the next four, the least of `warps`, else sums."""
    instances: int
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    threads: int  # of a block, at most
    warps: int  # on a multiprocessor
    all_warps: int
    hmma: int
    ldgsts: int  # copies from global to shared memory
    load16: int  # accesses of 16 bytes for each thread, of global memory or by a pointer that may be of any
    store16: int
    mufu: int
    conversions: int
    divisions: int  # calls
    local: int  # accesses: spills, and arrays with indices that vary

    def joined(self, other: Kernel) -> Kernel:
        return Kernel(self.instances + other.instances, *map(max, self[1:5], other[1:5]), min(self.warps, other.warps),
                      *(a + b for a, b in zip(self[6:], other[6:])))


MORE_IS_WORSE = ("spilled", "conversions", "divisions", "local")
FEWER_IS_WORSE = ("warps", "all_warps", "hmma", "ldgsts", "load16", "store16")
BY_PTXAS = ("spilled", "warps")  # compared whatever the compiler


def instructions(code: Code) -> tuple[int, ...]:
    """As the fields of Kernel have them."""
    named = lambda *starts: [name for _, name, _ in code.text if name.startswith(starts)]  # noqa: E731
    wide = lambda *starts: sum(".128" in name for name in named(*starts))  # noqa: E731
    divisions = sum(name.startswith("CALL") and bool(re.search(r"__cuda_sm\d+_(div|rem)_[su]64", operands))
                    for _, name, operands in code.text)
    return (len(named("HMMA")), len(named("LDGSTS")), wide("LDG.", "LD."), wide("STG.", "ST."), len(named("MUFU")),
            len(named(*CONVERSIONS)), divisions, len(named(*LOCAL)))


class Build(NamedTuple):
    kernels: dict[str, Kernel]
    loops: dict[str, Loop]
    compiler: str  # its version; empty without nvdisasm, and `loops` with it


def key_of(file: str, name: str) -> str:
    plain = re.match(r"[:\w]*", name)
    return f"{file}:{plain[0] if plain else name}"


Machine = dict[tuple[str, str], tuple[int, tuple[int, ...]]]  # threads of a block and instructions


def disassembled(folder: Path, instances: dict[tuple[str, str], Instance]) -> tuple[Machine, dict[str, Loop], str]:
    """And the loops, and the compiler's version. Raises ValueError where a kernel has no launch bounds."""
    machine: Machine = {}
    found: dict[str, Loop] = {}
    versions: set[str] = set()
    files = sorted({file for file, _ in instances})
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for file, (text, version) in zip(files, pool.map(listing, (folder / f"{file}.cu.o" for file in files))):
            versions.add(version)
            bounds = threads_of(text)
            for name, code in kernels_of(text).items():
                full = instances[file, name].name
                if name not in bounds:
                    raise ValueError(f"{file}: {full} has no launch bounds")
                machine[file, name] = bounds[name], instructions(code)
                found.update({key: count(code, scores) for key, (start, scores) in LOOPS.items()
                              if full.startswith(start)})
    return machine, found, ", ".join(sorted(versions))


def read_build(folder: Path) -> Build:
    instances = read_logs(sorted(folder.glob("*.ptxas")))
    machine: Machine = dict.fromkeys(instances, (0, (0,) * 8))
    found: dict[str, Loop] = {}
    compiler = ""
    if tool("nvdisasm") and tool("cuobjdump"):
        machine, found, compiler = disassembled(folder, instances)
    kernels: dict[str, Kernel] = {}
    for key, (threads, counts) in machine.items():
        name, registers, spilled, shared = instances[key]
        at = key_of(key[0], name)
        shared += dynamic_of(at, name)
        fit = warps(registers, threads, shared) if threads else warps(registers)
        kernel = Kernel(1, registers, spilled, shared, threads, fit, fit, *counts)
        kernels[at] = kernels[at].joined(kernel) if at in kernels else kernel
    return Build(kernels, found, compiler)


# ---- the tables ----

def read_rows(path: Path) -> list[list[str]]:
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return lines[1:]


def write_rows(path: Path, title: str, fields: tuple[str, ...], rows: dict[str, tuple]) -> None:
    lines = ["\t".join(("kernel", *fields)), *("\t".join((name, *map(str, row))) for name, row in rows.items())]
    path.write_text("".join(f"{line}\n" for line in (title, *lines)), encoding="utf-8")


def read_table(path: Path = LOOPS_TABLE) -> dict[str, Loop]:
    return {name: Loop(*map(int, numbers)) for name, *numbers in read_rows(path)}


def write_table(table: dict[str, Loop], path: Path = LOOPS_TABLE) -> None:
    write_rows(path, f"# One pass of a warp through a loop, by nvdisasm for sm_{ARCHITECTURE}; made by sass.py --write",
               Loop._fields, {name: table[name] for name in LOOPS})


def read_kernels(path: Path = KERNELS) -> tuple[dict[str, Kernel], str]:
    """And the version of the compiler."""
    return ({name: Kernel(*map(int, numbers)) for name, *numbers in read_rows(path)},
            re.search(r"nvcc ([\d.]+) ", path.read_text(encoding="utf-8"))[1])


def write_kernels(kernels: dict[str, Kernel], compiler: str, path: Path = KERNELS) -> None:
    title = f"# The most, least or sum of all instances, by nvcc {compiler} for sm_{ARCHITECTURE}"
    write_rows(path, f"{title}; made by sass.py --write", Kernel._fields, dict(sorted(kernels.items())))


def by_registers(kernels: dict[str, Kernel]) -> dict[str, Kernel]:
    """What is known without nvdisasm."""
    return {name: kernel._replace(warps=warps(kernel.registers)) for name, kernel in kernels.items()}


def check_kernels(found: dict[str, Kernel], known: dict[str, Kernel], has_same_compiler: bool = True) -> list[str]:
    """What is worse than in the table; and kernels and instances that one of both has."""
    wrong = [f"{name}: only one of table and build has it; write {KERNELS.name} again"
             for name in sorted(found.keys() ^ known.keys())]
    for name in sorted(found.keys() & known.keys()):
        new, old = found[name], known[name]
        is_counted = has_same_compiler and new.instances == old.instances
        if new.instances != old.instances:
            wrong.append(f"{name}: {new.instances} instances, before {old.instances}; write {KERNELS.name} again")
        for field in (*MORE_IS_WORSE, *FEWER_IS_WORSE):
            now, before = getattr(new, field), getattr(old, field)
            if now != before and (now > before) == (field in MORE_IS_WORSE) and (is_counted or field in BY_PTXAS):
                wrong.append(f"{name}: {field} {now}, before {before}")
    return wrong


def worse(found: dict[str, Loop], known: dict[str, Loop]) -> list[str]:
    """Loops that keep a multiprocessor busy longer than the table says, or spill more; or are not in both."""
    wrong = [f"{name}: only one of table and build has it" for name in sorted(found.keys() ^ known.keys())]
    for name in found.keys() & known.keys():
        new, old = cycles(found[name]) / found[name].scores, cycles(known[name]) / known[name].scores
        if new > 1.01 * old or found[name].local > known[name].local:
            wrong.append(f"{name}: {new:.3f} cycles a score and {found[name].local} spills, before {old:.3f} and "
                         f"{known[name].local}")
    return wrong


def compared(build: Build, known: dict[str, Kernel], compiler: str) -> list[str]:
    if not build.compiler:
        print("nvdisasm is not in build/nvidia (facts.py fetch disassembler): only registers and spills are compared")
        return check_kernels(build.kernels, by_registers(known), False)
    if build.compiler != compiler:
        print(f"{KERNELS.name} is by nvcc {compiler}, the build by {build.compiler}: instructions are not compared")
    return check_kernels(build.kernels, known, build.compiler == compiler) + worse(build.loops, read_table())


def main(*arguments: str) -> None:
    folder = next(iter(ROOT.glob(BUILD)), None)
    build = read_build(folder) if folder else Build({}, {}, "")
    if not build.kernels:
        raise SystemExit(f"the build in place is without ONNXTRAIN_CUDA_ARCHS={ARCHITECTURE}")
    if "--write" in arguments:
        if not build.compiler:
            raise SystemExit("nvdisasm is not in build/nvidia: facts.py fetch disassembler")
        write_kernels(build.kernels, build.compiler)
        write_table(build.loops)
    wrong = compared(build, *read_kernels())
    instances = sum(kernel.instances for kernel in build.kernels.values())
    print("\n".join(wrong) or f"{instances} instances of {len(build.kernels)} kernels are no worse than in the tables")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
