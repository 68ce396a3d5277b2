"""Operators with more threads than cores, in numbers that change (thread_cases.py), in a process that may die of it."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def test_operators():
    done = subprocess.run([sys.executable, str(HERE / "thread_cases.py")], capture_output=True, text=True, timeout=600)
    last = (done.stdout.splitlines() or ["nothing"])[-1]
    assert done.returncode == 0, f"exit {done.returncode} behind {last}\n{done.stderr[-2000:]}"


FIRST = """
import os, sys
import torch
import numpy as np
import onnx
from onnx import helper
from onnxtrain import _C
torch.set_num_threads(4)
x = torch.empty(512, 512)
np.asarray(x)[:] = 1  # by one thread
node = helper.make_node(sys.argv[1], ["x", "x"], ["y"])
graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", 1, x.shape)], [onnx.ValueInfoProto(name="y")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
_C.Session(model.SerializeToString()).forward([x], b"\\0")
tiny = torch.empty(1 << 18)
np.asarray(tiny)[:] = 1e-40
print(int(((tiny + tiny) != 0).sum()))
"""


@pytest.mark.parametrize("op_type, gemm", [("Add", ""), ("MatMul", "torch")])
def test_threads_that_a_program_makes(op_type, gemm, monkeypatch):
    """The process's first region of many threads is one of ours, or of a library that we call: its new threads do not
    take denormals as zero ever after.
    """
    monkeypatch.setenv("ONNXTRAIN_GEMM", gemm)
    done = subprocess.run([sys.executable, "-c", FIRST, op_type], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and int(done.stdout) == 1 << 18, done
