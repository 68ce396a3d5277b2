"""Kernels that compete take turns in the first runs of a step, and the fastest stays: results are right meanwhile, and
what was decided is text for another process.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from harness import Case, R, _arrays, failing_allocations, session_of
from seeds import drawn_seed

from onnxtrain import _C

needs_rivals = pytest.mark.skipif(not {"onednn", "native"} <= set(_C.build_info()["gemm"]), reason="fewer kernels")
RIVALS = ["matmul_native", "matmul_primitive", "matmul_blas"]


def line(m=256, winner="matmul_blas", kernels=RIVALS, threads=61, op="MatMul"):
    """As _C.measured_products() has it, of 61 threads: nothing else here asks for it."""
    return f"{threads} {op} float[{m},362] float[362,91] 0:float : {' '.join(kernels)} > {winner}\n"


def product(m, n, k):
    """A session of A B, its operands, and the product in float64."""
    arrays = _arrays(case := Case("MatMul", [R(m, k), R(k, n)]), "float32")
    a, b = (torch.from_numpy(array) for array in arrays)
    return session_of(case, arrays), [a, b], a.double() @ b.double()


def kernels(session):
    return [kernel for _, kernel, _ in session.kernels()]


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Nothing in the environment chooses."""
    monkeypatch.delenv("ONNXTRAIN_GEMM", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    _C.set_deterministic(False)


@needs_rivals
def test_a_short_product_is_decided_in_its_first_run():
    """Each call has the same bits, the first one too."""
    session, operands, want = product(451, 233, 157)
    before = _C.measured_products()
    results = [session.forward(operands, b"\0\0")[0][0] for _ in range(4)]
    assert (results[0] - want).abs().max() < 1e-4 and all(torch.equal(results[0], y) for y in results)
    (chosen,) = kernels(session)
    told = _C.measured_products().removeprefix(before)
    assert told.endswith(f" > {chosen}\n") and told.count("\n") == 1, told


@needs_rivals
def test_a_long_product_takes_turns_in_its_first_runs():
    session, operands, want = product(2049, 2047, 2048)
    used, results = [], []
    for _ in range(3 * len(RIVALS) + 2):  # as many runs as it may take
        results.append(session.forward(operands, b"\0\0")[0][0])
        assert (results[-1] - want).abs().max() < 1e-3
        used += kernels(session)
    assert len(set(used)) > 1 and set(used) <= set(RIVALS) and used[-1] == used[-2]
    assert torch.equal(results[-1], results[-2])


@needs_rivals
def test_a_later_program_of_the_kind_has_the_winner_alone():
    """Sizes within a factor of 1.4 are one kind; another number of threads is another."""
    torch.set_num_threads(2)
    first, operands, _ = product(700, 260, 190)
    for _ in range(9):
        first.forward(operands, b"\0\0")
    known = _C.measured_products()
    other, operands, want = product(760, 250, 175)
    for _ in range(2):
        assert (other.forward(operands, b"\0\0")[0][0] - want).abs().max() < 1e-4
        assert kernels(other) == kernels(first)
    assert _C.measured_products() == known
    torch.set_num_threads(1)
    third, operands, _ = product(700, 260, 190)
    for _ in range(9):
        third.forward(operands, b"\0\0")
    assert _C.measured_products().removeprefix(known).startswith("1 MatMul ")


@needs_rivals
@pytest.mark.parametrize("how", ["deterministic", "environment", "small"])
def test_where_nothing_competes(how, monkeypatch):
    session, operands, want = product(*((20, 30, 40) if how == "small" else (333, 222, 111)))
    if how == "environment":
        monkeypatch.setenv("ONNXTRAIN_GEMM", "primitive")
    _C.set_deterministic(how == "deterministic")
    before = _C.measured_products()
    results = [session.forward(operands, b"\0\0")[0][0] for _ in range(9)]
    assert all(torch.equal(results[0], y) for y in results) and (results[0] - want).abs().max() < 1e-4
    assert _C.measured_products() == before
    expected = {"deterministic": ["matmul_native"], "environment": ["matmul_primitive"]}
    assert kernels(session) == expected.get(how, kernels(session))


@needs_rivals
def test_no_memory_while_rivals_are_bound():
    def run():
        session, operands, want = product(531, 341, 123)
        return (session.forward(operands, b"\0\0")[0][0] - want).abs().max()

    assert failing_allocations(run) < 1e-4


def test_lines_are_taken_once():
    assert _C.remember_products(line() + line(m=362) + line(m=512, winner=RIVALS[0]) + line(winner=RIVALS[1])) == 3
    known = _C.measured_products()
    assert line() in known and line(m=512, winner=RIVALS[0]) in known and line(winner=RIVALS[1]) not in known
    assert _C.remember_products(known) == 0


# Arguments: text of a kind that takes turns. Prints the kernels of its runs, of which the first is before the text.
MEANWHILE = """
import json, sys, torch
from harness import Case, R, _arrays, session_of
from onnxtrain import _C
torch.set_num_threads(1)
arrays = _arrays(case := Case("MatMul", [R(1024, 1024), R(1024, 1024)]), "float32")
session, used = session_of(case, arrays), []
for run in range(3):
    session.forward([torch.from_numpy(a) for a in arrays], b"\\0\\0")
    used += [kernel for _, kernel, _ in session.kernels()]
    taken = _C.remember_products(sys.argv[1])
print(json.dumps([taken, used[1:], _C.measured_products()]))
"""


def script(code, text):
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True,
                          env={key: value for key, value in os.environ.items() if key != "ONNXTRAIN_GEMM"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_rivals
@pytest.mark.parametrize("winner", RIVALS)
def test_a_text_decides_a_kind_that_takes_turns(winner):
    """As when another process has decided it in the meantime."""
    text = line(threads=1, winner=winner).replace("[256,362] float[362,91]", "[1024,1024] float[1024,1024]")
    assert script(MEANWHILE, text) == [0, [winner] * 2, text]


BAD = ["", "\n\n", "61", line(m=8)[:-14], line(m=8, winner="x"), line(m=8, winner=""), line(m=8, kernels=["matmul_blas"]),
       line(m=8, kernels=[*RIVALS, "fourth"]), line(m=8).replace(" : ", " "), line(m=8).replace(" > ", " "),
       line(m=8, op="M" * 300), line(m=8, winner="matmul_blas " + "x" * 600),
       "float float 0 61 0 1 64 64 64 torch torch\n"]  # of a version before


@pytest.mark.parametrize("text", BAD)
def test_lines_that_are_passed_over(text):
    assert _C.remember_products(text) == 0


# Arguments: text. Prints the kernels of a product before each of its first runs.
TOLD = """
import json, sys, torch
from harness import Case, R, _arrays, session_of
from onnxtrain import _C
torch.set_num_threads(2)
taken = _C.remember_products(sys.argv[1])
arrays = _arrays(case := Case("MatMul", [R(256, 362), R(362, 91)]), "float32")
session, used = session_of(case, arrays), []
for _ in range(4):
    session.forward([torch.from_numpy(a) for a in arrays], b"\\0\\0")
    used += [kernel for _, kernel, _ in session.kernels()]
print(json.dumps([taken, used, _C.measured_products()]))
"""


@needs_rivals
@pytest.mark.parametrize("winner", RIVALS)
def test_another_process_uses_what_the_text_says(winner):
    text = line(threads=2, winner=winner)
    assert script(TOLD, text) == [1, [winner] * 4, text]


# Arguments: text, seed. What it learns of mutants stays in this process.
MUTANTS = """
import random, sys
from onnxtrain import _C
source = random.Random(int(sys.argv[2]))
for _ in range(20000):
    mutant = list(sys.argv[1])
    for _ in range(source.randrange(1, 5)):
        at = source.randrange(len(mutant))
        mutant[at:at + source.randrange(3)] = source.choice(["", " ", chr(10), "9" * 30, ">", ":", "%n", "\u00e9"])
    _C.remember_products("".join(mutant))
assert _C.remember_products(_C.measured_products()) == 0
"""


def test_no_mutant_of_the_text_does_harm():
    done = subprocess.run([sys.executable, "-c", MUTANTS, line() + line(m=362, winner=RIVALS[0]), str(drawn_seed())],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wrong, error", [(3, TypeError), ("float\0", ValueError)])
def test_text_that_is_none(wrong, error):
    with pytest.raises(error):
        _C.remember_products(wrong)


def test_no_memory_for_the_text():
    _C.fail_allocation_after(0)
    try:
        with pytest.raises(MemoryError):
            _C.measured_products()
    finally:
        _C.fail_allocation_after(-1)
