"""Which way products go, kept on disk: the next process measures nothing; whatever the file holds, products are right."""

import json
import logging
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from onnxtrain import _C
from onnxtrain._export import products

ROOT = Path(__file__).resolve().parents[2]
WAYS = [name for name in _C.build_info()["gemm"] if name not in ("plain", "tiled")]

# Steps of a small module with ORTMODULE_CACHE_DIR: what was known before and after, and which products were measured.
STEPS = """
import json, logging, sys
import torch
from onnxtrain import _C
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule

measured = []
class Handler(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("gemm "):
            measured.append(record.getMessage())
logging.getLogger("onnxtrain").addHandler(Handler())
logging.getLogger("onnxtrain").setLevel(logging.DEBUG)
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(96, int(sys.argv[2])), torch.nn.GELU(), torch.nn.Linear(int(sys.argv[2]), 24))
model = ORTModule(net, DebugOptions(LogLevel.VERBOSE))
x = torch.randn(256, 96)
before = _C.measured_products()
loss = model(x).square().mean()
loss.backward()
grads = [p.grad for p in net.parameters()]
want = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
for a, b in zip(grads, want):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
print(json.dumps([before, _C.measured_products(), measured]))
"""


def run(script, *words, **environment):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), *map(str, words)], capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(folder, threads=2, width=200):
    return json.loads(run(STEPS, threads, width, ORTMODULE_CACHE_DIR=str(folder)).splitlines()[-1])


needs_choice = pytest.mark.skipif(len(WAYS) < 2, reason="one library: nothing is measured")


@needs_choice
def test_the_next_process_measures_nothing(tmp_path):
    before, known, measured = steps(tmp_path)
    assert not before and measured and known.count("\n") >= 2
    assert products.path(str(tmp_path)).read_text() == known
    before, again, measured = steps(tmp_path)
    assert (before, again, measured) == ("", known, [])


@needs_choice
def test_threads_and_sizes_are_kinds_of_their_own(tmp_path):
    _, two, _ = steps(tmp_path)
    _, one, measured = steps(tmp_path, threads=1)
    assert measured and one.startswith(two) and len(one) > len(two)
    assert products.path(str(tmp_path)).read_text() == one


@needs_choice
def test_what_is_measured_later_is_kept_when_the_process_ends(tmp_path):
    run("""
        import torch
        from onnxtrain.ortmodule import ORTModule
        model = ORTModule(torch.nn.Linear(96, 200))
        for rows in (4, 2000):
            model(torch.randn(rows, 96)).sum().backward()
        """, ORTMODULE_CACHE_DIR=str(tmp_path))
    assert " 2000 " in products.path(str(tmp_path)).read_text()


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"\xff\xfe" * 500, b"float float 0 2\n", b"x" * 5000])
def test_a_file_of_something_else(tmp_path, content):
    products.path(str(tmp_path)).write_bytes(content)
    before = _C.measured_products()
    products.recall(str(tmp_path))
    assert _C.measured_products() == before
    _C.remember_products(line(m=31, n=31, k=len(content) + 2000))
    products.keep(str(tmp_path))
    assert products.path(str(tmp_path)).read_text() == _C.measured_products() and not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file")
    with caplog.at_level(logging.WARNING, logger="onnxtrain"):
        steps(folder)  # in another process: gradients are right there
        products._written.pop(folder, None)
        _C.remember_products(line(m=7001))
        products.keep(folder)
    assert "not kept" in caplog.text and len(caplog.records) == 2  # it cannot be read either


def test_files_of_processes_side_by_side_are_joined(tmp_path):
    folder = str(tmp_path)
    products.path(folder).write_text(line(m=7103, n=11))
    _C.remember_products(line(m=7103, n=1009))
    products.keep(folder)
    text = products.path(folder).read_text()
    assert line(m=7103, n=11) in text and line(m=7103, n=1009) in text


def line(dtype="float", out="float", with_=0, threads=61, trans_a=0, trans_b=1, m=64, n=64, k=64, best="torch",
         ways=("torch",)):
    return f"{dtype} {out} {with_} {threads} {trans_a} {trans_b} {m} {n} {k} {' '.join((best, *ways))}\n"


needs_torch = pytest.mark.skipif("torch" not in WAYS, reason="torch brings no BLAS that can be called")


@needs_torch
def test_lines_are_taken_once():
    huge = line(m=40001, n=400001, ways=("torch", "torch"))  # its own runs decide between two ways
    assert _C.remember_products(huge + line(m=40001) + line(m=40002) + line(m=400001, n=3)) == 3
    known = _C.measured_products()
    assert huge in known and line(m=40001) in known and line(m=40002) not in known  # within a factor of 1.4: one kind
    assert _C.remember_products(known) == 0


BAD = ["", "\n\n", "float", line(m=0), line(n=-3), line(k="x"), line(dtype="int64"), line(out="complex"), line(best="mkl"),
       line(best="-"), line(best="primitive"), line(ways=()), line(ways=("fast",)), line(ways=["torch"] * 11),
       line(ways=("plain",)), line(dtype="bfloat16", out="bfloat16"), line(m=8001)[:-8], line(best="t" * 40),
       line(m=8003).replace("torch", "torch" + " " * 400)]


@pytest.mark.parametrize("text", BAD)
def test_lines_that_are_passed_over(text):
    assert _C.remember_products(text) == 0


WIDTHS = {way: 64 << i for i, way in enumerate([*WAYS, "primitive", "tiled"])}


@needs_torch
def test_products_go_the_way_that_the_text_says():
    """In a process of its own; a line whose way is not here is passed over, and that kind measured."""
    text = "".join(line(with_=with_, threads=2, trans_a=a, trans_b=b, m=m, n=n, k=k, best=way if way in WAYS else "torch",
                        ways=(way,)) for way, width in WIDTHS.items() for with_ in range(4) for a in (0, 1)
                   for b in (0, 1) for m, n, k in ((160, width, 320), (width, 320, 160), (160, 320, width)))
    out = run("""
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
        """, text, json.dumps(WIDTHS), ONNXTRAIN_GEMM="")
    new, taken = map(int, out.splitlines()[-1].split()[1:])
    assert taken % 48 == 0 and taken >= 48 * len(set(WAYS) - {"shares"})
    assert (new > 0) == (taken < text.count("\n"))


@needs_torch
def test_mutants():
    seed = random.randrange(2**32)
    print("seed", seed)
    source = random.Random(seed)
    text = line(m=77, ways=("tiled", "torch", "tiled")) + line(dtype="double", out="double") + line(best="shares")
    for _ in range(2000):
        mutant = list(text)
        for _ in range(source.randrange(1, 5)):
            at = source.randrange(len(mutant))
            mutant[at:at + source.randrange(3)] = source.choice(["", " ", "\n", "9" * 30, "-", "%n", "float", "é"])
        _C.remember_products("".join(mutant))
    assert _C.remember_products(_C.measured_products()) == 0


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
