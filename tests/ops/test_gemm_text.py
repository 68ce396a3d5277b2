"""Which way products go, as text for another process: what it takes, and that products are right whatever it says."""

import json
import os
import subprocess
import sys

import pytest
from seeds import drawn_seed

from onnxtrain import _C

WAYS = [name for name in _C.build_info()["gemm"] if name not in ("reference", "native")]


def line(dtype="float", out="float", with_=0, threads=61, trans_a=0, trans_b=1, m=64, n=64, k=64, best="torch",
         ways=("torch",)):
    return f"{dtype} {out} {with_} {threads} {trans_a} {trans_b} {m} {n} {k} {' '.join((best, *ways))}\n"


def script(code, *words):
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True,
                          env={**os.environ, "ONNXTRAIN_GEMM": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_torch = pytest.mark.skipif("torch" not in WAYS, reason="torch brings no BLAS that can be called")


@needs_torch
def test_lines_are_taken_once():
    huge = line(m=40001, n=400001, ways=("torch", "torch", "torch"))  # its own runs decide between two ways
    assert _C.remember_products(huge + line(m=40001) + line(m=40002) + line(m=400001, n=3)) == 3
    known = _C.measured_products()
    assert huge in known and line(m=40001) in known and line(m=40002) not in known  # within a factor of 1.4: one kind
    assert _C.remember_products(known) == 0


@needs_torch
@pytest.mark.skipif("native" not in _C.build_info()["gemm"], reason="no native GEMM on this processor")
def test_older_names():
    """Text of a version that called the native GEMM tiled."""
    assert _C.remember_products(line(m=160001, ways=("tiled",))) == 1
    assert line(m=160001, ways=("native",)) in _C.measured_products()


BAD = ["", "\n\n", "float", line(m=0), line(n=-3), line(k="x"), line(dtype="int64"), line(out="complex"),
       line(best="mkl"), line(best="-"), line(best="primitive"), line(ways=()), line(ways=("fast",)), line(ways=["torch"] * 11),
       line(ways=("reference",)), line(dtype="bfloat16", out="bfloat16"), line(m=8001)[:-8], line(best="t" * 40),
       line(m=8003).replace("torch", "torch" + " " * 400)]


@pytest.mark.parametrize("text", BAD)
def test_lines_that_are_passed_over(text):
    assert _C.remember_products(text) == 0


# Argument: text, widths of layers.
STEPS = """
import json, sys, torch
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule
torch.set_num_threads(2)
taken = _C.remember_products(sys.argv[1])
for width in json.loads(sys.argv[2]).values():
    net = torch.nn.Linear(320, width)
    x = torch.randn(160, 320, requires_grad=True)
    ORTModule(net)(x).square().sum().backward()
    got = [x.grad, *(p.grad for p in net.parameters())]
    y = x.detach().double() @ net.weight.double().T + net.bias.double()
    want = [2 * y @ net.weight.double(), 2 * y.T @ x.detach().double(), 2 * y.sum(0)]
    for a, b in zip(got, want):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()
print("new", _C.measured_products().count(chr(10)) - taken, taken)
"""
WIDTHS = {way: 64 << i for i, way in enumerate([*WAYS, "primitive", "native"])}


@needs_torch
def test_products_go_the_way_that_the_text_says():
    """In a process of its own; a line whose way is not here is passed over, and that kind measured."""
    text = "".join(line(with_=with_, threads=2, trans_a=a, trans_b=b, m=m, n=n, k=k, ways=(way,),
                        best=way if way in WAYS else "torch") for way, width in WIDTHS.items() for with_ in range(4)
                   for a in (0, 1) for b in (0, 1)
                   for m, n, k in ((160, width, 320), (width, 320, 160), (160, 320, width)))
    new, taken = map(int, script(STEPS, text, json.dumps(WIDTHS)).splitlines()[-1].split()[1:])
    assert taken % 48 == 0 and taken >= 48 * len(set(WAYS) - {"per_thread"})
    assert (new > 0) == (taken < text.count("\n"))


# Arguments: text, whose first kind is the product of this layer.
TRIAL = """
import sys, torch
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule
torch.set_num_threads(2)
_C.remember_products(sys.argv[1])
net = ORTModule(torch.nn.Linear(1024, 2048))
x = torch.randn(1024, 1024)
with torch.no_grad():
    for _ in range(8):
        net(x)
print(_C.measured_products().splitlines()[0])
"""


@needs_torch
def test_runs_of_their_own_decide_once():
    ways = ["torch", "primitive", "native"]
    text = "".join(line(with_=1, threads=2, m=1024, n=2048, k=1024, ways=("torch", *pair))
                   for pair in (("torch", way) for way in ways[1:]))  # the first line whose ways are here counts
    first = script(TRIAL, text).splitlines()[-1]
    assert len(first.split()) == 11 and first.split()[-1] in ways  # no word of others any more
    assert script(TRIAL, first).splitlines()[-1] == first


# Arguments: text, seed. What it learns of mutants stays in this process.
MUTANTS = """
import random, sys
from onnxtrain import _C
source = random.Random(int(sys.argv[2]))
for _ in range(20000):
    mutant = list(sys.argv[1])
    for _ in range(source.randrange(1, 5)):
        at = source.randrange(len(mutant))
        mutant[at:at + source.randrange(3)] = source.choice(["", " ", chr(10), "9" * 30, "-", "%n", "float", "\u00e9"])
    _C.remember_products("".join(mutant))
assert _C.remember_products(_C.measured_products()) == 0
"""


@needs_torch
def test_mutants():
    text = line(m=77, ways=("native", "torch", "native")) + line(dtype="double", out="double") + line(best="per_thread")
    script(MUTANTS, text, drawn_seed())


def test_text_of_another_kind():
    with pytest.raises(TypeError):
        _C.remember_products(b"float")
    with pytest.raises(ValueError, match="null"):
        _C.remember_products("float\0")


def test_no_memory_for_the_text():
    _C.fail_allocation_after(0)
    try:
        with pytest.raises(MemoryError):
            _C.measured_products()
    finally:
        _C.fail_allocation_after(-1)
