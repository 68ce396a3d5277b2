"""Instructions of the loops in which kernels spend their time, as nvdisasm prints them for sm_90, and how long a
multiprocessor is busy with them.

    python tests/cuda/facts.py fetch nvdisasm       a wheel of PyPI, to build/nvidia: 5 MB
    python tests/cuda/sass.py [--write]             loops.tsv against what nvcc makes of the sources now

A loop is the smallest that has all tensor-core instructions of its kernel. Of the ways through it that one is counted
which has the most products, exponentials and copies to shared memory, and of those the shortest: all is computed, and nothing is masked or
dropped. Loops within it count as one pass. --write writes the table.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import facts

TABLE = Path(__file__).with_name("loops.tsv")
# In the table; the source; the demangled name begins with; scores of a warp in one pass.
LOOPS = {
    "flash_mma_kernel<64>": ("flash_mma", "flash_mma_kernel<ont_bf16, 64,", 32 * 32),
    "flash_mma_dq_kernel<64>": ("flash_mma_grad", "flash_mma_dq_kernel<ont_bf16, 64,", 16 * 64),
    "flash_mma_dkv_kernel<64>": ("flash_mma_grad", "flash_mma_dkv_kernel<ont_bf16, 64,", 16 * 64),
    "flash_mma_kernel<128>": ("flash_mma", "flash_mma_kernel<ont_bf16, 128,", 16 * 64),
    "flash_mma_dq_kernel<128>": ("flash_mma_grad", "flash_mma_dq_kernel<ont_bf16, 128,", 16 * 32),
    "flash_mma_dkv_kernel<128>": ("flash_mma_grad", "flash_mma_dkv_kernel<ont_bf16, 128,", 16 * 32),
}
LABEL = re.compile(r"^(\.\w+):")
FUNCTION = re.compile(r"^\.text\.(\S+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
TARGET = re.compile(r"`\((\.\w+)\)")


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
            return Loop(scores, len(way), len(named("HMMA")), len(named("MUFU")), len(named("F2F", "F2I", "I2F")),
                        sum(map(units, named("LDS", "STS"))),
                        sum(".128" in name for name in named("LDG", "STG", "LDGSTS")), len(named("LDL", "STL")))
    raise ValueError("no loop has all tensor-core instructions")


# ---- the table ----

def nvdisasm() -> Path | None:
    return next(iter(sorted((facts.FOLDER / "nvdisasm").rglob("bin/nvdisasm"))), None)


def listing(source: str) -> str:
    """Of the kernels of cuda/kernels/SOURCE.cu."""
    cuda = facts.ROOT / "cuda"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        subprocess.run(["nvcc", "-std=c++17", "-O3", "-cubin", f"-arch=sm_{facts.ARCHITECTURE}", f"-I{cuda}",
                        f"-I{facts.ROOT / 'csrc'}", str(cuda / f"kernels/{source}.cu"), "-o", str(cubin)], check=True)
        tool = nvdisasm()
        tool.chmod(0o755)  # which zipfile leaves out
        return subprocess.run([str(tool), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout


def measured() -> dict[str, Loop]:
    """What the sources give now."""
    found: dict[str, Loop] = {}
    for source in sorted({name for name, _, _ in LOOPS.values()}):
        kernels = kernels_of(listing(source))
        names = subprocess.run(["c++filt"], input="\n".join(kernels), text=True, capture_output=True,
                               check=True).stdout.splitlines()
        by_name = {name.removeprefix("void "): code for name, code in zip(names, kernels.values(), strict=True)}
        for key, (file, start, scores) in LOOPS.items():
            if file == source:
                found[key] = count(next(code for name, code in by_name.items() if name.startswith(start)), scores)
    return found


def read_table(path: Path = TABLE) -> dict[str, Loop]:
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name: Loop(*map(int, numbers)) for name, *numbers in lines[1:]}


def write_table(table: dict[str, Loop], path: Path = TABLE) -> None:
    rows = ["# One pass of a warp through a loop, by nvdisasm for sm_90; made by sass.py --write",
            "\t".join(("kernel", *Loop._fields)),
            *("\t".join((name, *map(str, loop))) for name, loop in table.items())]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def worse(found: dict[str, Loop], known: dict[str, Loop]) -> list[str]:
    """Loops that keep a multiprocessor busy longer than the table says, or spill more; or are not in both."""
    wrong = [f"{name}: only one of table and build has it" for name in sorted(found.keys() ^ known.keys())]
    for name in found.keys() & known.keys():
        new, old = cycles(found[name]) / found[name].scores, cycles(known[name]) / known[name].scores
        if new > 1.01 * old or found[name].local > known[name].local:
            wrong.append(f"{name}: {new:.3f} cycles a score and {found[name].local} spills, before {old:.3f} and "
                         f"{known[name].local}")
    return wrong


def main(*arguments: str) -> None:
    if not nvdisasm():
        raise SystemExit("nvdisasm is not in build/nvidia: facts.py fetch nvdisasm")
    found = measured()
    if "--write" in arguments:
        write_table(found)
    wrong = worse(found, read_table())
    print("\n".join(wrong) or f"{len(found)} loops are as in {TABLE.name}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
