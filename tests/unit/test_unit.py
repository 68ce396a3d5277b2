"""Builds the layers that need no Python (base, ir, plan; of simd what csrc/simd/simd.h declares; the pool) with the tests in *.c
under AddressSanitizer and UBSan, and runs each TEST(name) as a case. ONNXTRAIN_TEST_SEED repeats a random test.
With ONNXTRAIN_TEST_RUNNER, an emulator's command, CC compiles for another processor, without the sanitizers.
"""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from seeds import SEED, drawn_seed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LAYERS = ("base", "ir", "plan", "simd")  # without the folders in them: no test here reaches those of simd
MORE = ("run/pool.c",)  # of layers that need libraries
SOURCES = sorted(HERE.glob("*.c"))
TESTS = [(source.stem, name) for source in SOURCES for name in re.findall(r"^TEST\((\w+)\)", source.read_text(), re.M)]
COMMON = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g1", "-fwrapv", "-ffp-contract=off",
          "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fno-omit-frame-pointer", f"-I{ROOT / 'csrc'}",
          f"-I{HERE}"]
RUNNER = shlex.split(os.environ.get("ONNXTRAIN_TEST_RUNNER", ""))
SANITIZERS = [] if RUNNER else ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
CHECKED = ["-O1", *SANITIZERS]
# The inner loops for every instruction set; -fexpensive-optimizations contracts products and sums, as accuracy needs. With
# -O3, as all other tests run them, AddressSanitizer takes four times as long to compile.
LOOPS = ["-O1", "-fexpensive-optimizations", *([] if RUNNER else ["-fsanitize=address"])]


def instruction_sets() -> dict[str, list[str]]:
    """What setup.py compiles the inner loops for on the processor that CC compiles for."""
    shown = subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-dumpmachine"], capture_output=True, text=True,
                           check=True)
    for statement in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "ISAS":
            return ast.literal_eval(statement.value)[shown.stdout.split("-")[0]]
    raise AssertionError("setup.py has no ISAS")


@pytest.fixture(scope="session")
def program(tmp_path_factory) -> Path:
    """The tests' program, which one worker of pytest-xdist builds for all."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "unit"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "unit"
        return made if made.exists() else build(folder, made)


def build(folder: Path, made: Path) -> Path:
    cc = shlex.split(os.environ.get("CC", "cc"))
    jobs = [(source, folder / f"{source.parent.name}-{source.stem}.o", CHECKED)
            for source in [*(p for layer in LAYERS for p in sorted((ROOT / "csrc" / layer).glob("*.c"))),
                           *(ROOT / "csrc" / name for name in MORE), *SOURCES]
            if not source.name.endswith(".inc.c")]
    jobs += [(source, folder / f"{source.stem}-{isa}.o", [*LOOPS, *flags, f"-DONT_ISA={isa}"])
             for source in sorted((ROOT / "csrc/simd").glob("*.inc.c")) for isa, flags in instruction_sets().items()]

    def compile_one(job: tuple[Path, Path, list[str]]) -> None:
        source, target, flags = job
        done = subprocess.run([*cc, *COMMON, *flags, "-c", str(source), "-o", str(target)], capture_output=True,
                              text=True)
        assert done.returncode == 0, f"{source}:\n{done.stderr}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, jobs))
    subprocess.run([*cc, *COMMON, *CHECKED, *(str(target) for _, target, _ in jobs), "-lm", "-ldl", "-o", str(made)],
                   check=True)
    return made


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # A sanitizer that is preloaded for the extension would come before the one that is linked in.
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    return subprocess.run([*RUNNER, str(program), *arguments], capture_output=True, text=True, timeout=300,
                          env={**clean, "ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=4096",
                               "UBSAN_OPTIONS": "print_stacktrace=1", SEED: str(drawn_seed()), **environment})


@pytest.mark.parametrize("file, name", TESTS, ids=[f"{file}-{name}" for file, name in TESTS])
def test_unit(program, file, name):
    done = run(program, name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_test_is_listed(program):
    assert sorted(run(program).stdout.split()) == sorted(name for _, name in TESTS)


def test_a_failing_check_fails(program):
    """The harness itself: a name that is no test, and an error of a sanitizer or a check, give another exit status."""
    assert run(program, "no_such_test").returncode != 0
    assert run(program, "map_agrees_with_a_list", ONNXTRAIN_TEST_SEED="1").returncode == 0
    broken = run(program, "check_of_the_harness", ONNXTRAIN_UNIT_FAIL="1")
    assert broken.returncode == 1 and "condition_that_fails" in broken.stderr


def test_hash_differs_between_processes(program):
    """Names that collide in one process do not in the next: the table's order follows a key drawn at the start."""
    orders = {run(program, "map_order").stdout for _ in range(4)}
    assert len(orders) == 4 and all(len(order.split()) == 64 for order in orders)
