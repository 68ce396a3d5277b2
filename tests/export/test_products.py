"""Which way products go, kept on disk: the next process measures nothing. tests/ops/test_tuner.py has the text."""

import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest

from onnxtrain import _C
from onnxtrain._export import products

KIND = "61 MatMul float[{m},64] float[64,{n}] 0:float : a b > a\n"  # of 61 threads: nothing here asks for it

# Steps of a small module with ORTMODULE_CACHE_DIR: what was known before and after, and which products were measured.
STEPS = """
import json, logging, sys
import torch
from onnxtrain import _C
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule

measured = []
class Handler(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("tuned "):
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
                          text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(folder, threads=2, width=200):
    return json.loads(run(STEPS, threads, width, ORTMODULE_CACHE_DIR=str(folder)).splitlines()[-1])


needs_choice = pytest.mark.skipif("native" not in _C.build_info()["gemm"], reason="one kernel: nothing competes")


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
    assert "[2048,91]" in products.path(str(tmp_path)).read_text()


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"\xff\xfe" * 500, b"2 MatMul float\n", b"x" * 5000])
def test_a_file_of_something_else(tmp_path, content):
    products.path(str(tmp_path)).write_bytes(content)
    before = _C.measured_products()
    products.recall(str(tmp_path))
    assert _C.measured_products() == before
    _C.remember_products(KIND.format(m=31, n=40 * len(content) + 2000))
    products.keep(str(tmp_path))
    assert products.path(str(tmp_path)).read_text() == _C.measured_products() and not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file")
    with caplog.at_level(logging.WARNING, logger="onnxtrain"):
        steps(folder)  # in another process: gradients are right there
        products._written.pop(folder, None)
        _C.remember_products(KIND.format(m=7001, n=64))
        products.keep(folder)
    assert "cannot write measurements of matrix products to" in caplog.text and len(caplog.records) == 2  # it cannot be read either


def test_a_folder_or_file_that_others_may_write_to(tmp_path, caplog):
    folder, open_to_all = str(tmp_path / "ours"), tmp_path / "theirs"
    line = KIND.format(m=7201, n=64)
    (tmp_path / "ours").mkdir(mode=0o700)
    products.path(folder).write_text(line)
    products.path(folder).chmod(0o666)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    products.path(str(open_to_all)).write_text(line)
    with caplog.at_level(logging.WARNING, logger="onnxtrain"):
        for place in (folder, str(open_to_all)):
            products.recall(place)
            _C.remember_products(KIND.format(m=7202, n=len(place)))
        products.keep(str(open_to_all))
    assert "7201" not in _C.measured_products() and products.path(str(open_to_all)).read_text() == line
    assert "mode 666" in caplog.text and "mode 777" in caplog.text
    products.path(folder).unlink()
    products._written[folder] = _C.measured_products()  # nothing is written when this process ends


def test_files_of_processes_side_by_side_are_joined(tmp_path):
    folder = str(tmp_path)
    products.path(folder).write_text(KIND.format(m=7103, n=11))
    _C.remember_products(KIND.format(m=7103, n=1009))
    products.keep(folder)
    text = products.path(folder).read_text()
    assert KIND.format(m=7103, n=11) in text and KIND.format(m=7103, n=1009) in text
