"""How kernels are chosen: nobody waits for a log with a lock held, and where torch.use_deterministic_algorithms() asks for
it no stopwatch decides, so that two processes have the same bits.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Case, R, _arrays, session_of

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

needs_choice = pytest.mark.skipif(not {"onednn", "native"} <= set(_C.build_info()["gemm"]), reason="nothing competes")


def run(script, *words, **environment):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), *map(str, words)], capture_output=True,
                          text=True, timeout=500, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# A handler gives up the GIL while it writes a line of the core; another thread then chooses a kernel with the GIL held.
LOGGING = """
    import faulthandler, logging, sys, threading, time
    faulthandler.dump_traceback_later(60, exit=True)  # needs no GIL
    import torch, onnx
    from onnx import helper
    from onnxtrain import _C

    def session(op_type, *shapes, **attrs):
        names = ["a", "b"]
        inputs = [helper.make_tensor_value_info(n, 1, s) for n, s in zip(names, shapes)]
        node = helper.make_node(op_type, names, ["y"], **attrs)
        graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        return _C.Session(model.SerializeToString()), [torch.ones(s) for s in shapes]

    torch.set_num_threads(2)
    start, line = sys.argv[1:3]
    first, other = {
        "convolution": (session("Conv", (2, 64, 56, 56), (64, 64, 3, 3), pads=[1, 1, 1, 1]),
                        session("Conv", (2, 32, 40, 40), (64, 32, 3, 3), pads=[1, 1, 1, 1])),
        "product": (session("MatMul", (300, 200), (200, 100)), session("MatMul", (100, 400), (400, 300))),
    }[start]
    writing, choosing, said = threading.Event(), threading.Event(), []

    class Slow(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith(line) and not writing.is_set():
                said.append(record.getMessage())
                writing.set()
                choosing.wait(50)
                time.sleep(0.5)

    logging.getLogger("onnxtrain").addHandler(Slow())
    logging.getLogger("onnxtrain").setLevel(logging.DEBUG)
    _C.set_log_level(logging.DEBUG)

    def later():
        assert writing.wait(50)
        choosing.set()
        other[0].forward(other[1], b"\\0\\0")

    thread = threading.Thread(target=later)
    thread.start()
    first[0].forward(first[1], b"\\0\\0")
    thread.join()
    print(said)
"""


@needs_choice
@pytest.mark.parametrize("start, line", [("product", "tuned "), ("convolution", "convolution ")])
def test_no_lock_is_held_while_python_logs(start, line):
    assert line in run(LOGGING, start, line)


ONE_LIBRARY = """
    import torch
    from harness import Case, R, _arrays, session_of
    from onnxtrain import _C

    case = Case("MatMul", [R(300, 200), R(200, 100)])
    tensors = [torch.from_numpy(a) for a in _arrays(case, "float32")]
    (y,), _ = session_of(case, [t.numpy() for t in tensors]).forward(tensors, b"\\0\\0")
    torch.testing.assert_close(y, tensors[0] @ tensors[1], rtol=1e-4, atol=1e-4)
    print(_C.build_info()["gemm"], _C.measured_products())
"""


def test_one_library_is_compared_with_the_own_kernel(tmp_path):
    """As on aarch64 with one thread: torch's BLAS alone. Without oneDNN, whose file here is another library."""
    package, copy = Path(_C.__file__).parent, tmp_path / "onnxtrain"
    (copy / "_libs").mkdir(parents=True)
    for path in (*package.iterdir(), *package.glob("_libs/*")):
        if path.name not in ("_libs", "libdnnl.so.3"):
            (copy / path.relative_to(package)).symlink_to(path)
    (copy / "_libs/libdnnl.so.3").symlink_to(_C.__file__)
    first = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    told = run(ONE_LIBRARY, PYTHONPATH=first, PYTHONSAFEPATH="1", OMP_NUM_THREADS="1")
    assert "onednn" not in told
    assert (" : matmul_native matmul_blas > " in told) == ("'native'" in told)


BITS = """
    import hashlib, json, sys
    import numpy as np
    import torch
    from harness import Case, R, _arrays, call, session_of
    from onnxtrain import _C

    torch.set_num_threads(3)
    # What this process has measured, or was told, does not matter.
    _C.remember_products("3 Gemm float[724,64] float[512,64] float[512] 0:float transB=1 : "
                         f"gemm_native gemm_primitive gemm_blas > {sys.argv[1]}\\n")
    _C.set_deterministic(True)
    digest = hashlib.sha256()
    for case in (Case("Gemm", [R(771, 64), R(500, 64), R(500)], {"transB": 1}), Case("MatMul", [R(7, 90, 70), R(7, 70, 90)]),
                 Case("Conv", [R(3, 64, 40, 40), R(64, 64, 3, 3), R(64)], {"pads": [1, 1, 1, 1]}),
                 Case("Attention", [R(2, 3, 257, 64)] * 3, {"is_causal": 1}, opset=23)):
        arrays = _arrays(case, np.float32)
        tensors = [torch.from_numpy(a).clone() for a in arrays]
        for _ in range(2):
            session = session_of(case, arrays)
            outputs, _ = call(session, tensors, bytes(len(tensors)), None)
            outputs, grads = call(session, tensors, bytes([1] * len(tensors)), [torch.ones_like(o) for o in outputs])
            digest.update(b"".join(t.numpy().tobytes() for t in (*outputs, *grads)))
    print(json.dumps([digest.hexdigest(), _C.measured_products()]))
"""


@needs_choice
def test_the_rule_has_the_same_bits_in_every_process():
    (first, told), (second, told_too) = [json.loads(run(BITS, name)) for name in ("gemm_primitive", "gemm_blas")]
    assert "> gemm_primitive" in told and "> gemm_blas" in told_too and first == second


@needs_choice
def test_deterministic_algorithms_ask_for_the_rule():
    """torch's switch, on a product of a kind that nobody has measured: a program by rule measures nothing."""
    model, x = ORTModule(torch.nn.Linear(401, 173)), torch.randn(97, 401)
    measured = []
    try:
        for on in (True, False):
            torch.use_deterministic_algorithms(on)
            before = _C.measured_products()
            model(x).sum().backward()
            measured.append(_C.measured_products() != before)
    finally:
        torch.use_deterministic_algorithms(False)
    assert measured == [False, True]


@needs_choice
def test_a_program_is_for_one_way_to_choose():
    """By rule and by measurement are two programs, each found again; and it is our own kernel that the rule takes."""
    case = Case("MatMul", [R(300, 200), R(200, 100)])
    arrays = _arrays(case, np.float32)
    tensors = [torch.from_numpy(a) for a in arrays]
    session = session_of(case, arrays)
    built = []
    try:
        for on in (True, False, True, False):
            _C.set_deterministic(on)
            session.forward(tensors, b"\0\0")
            built.append(session.stats()["programs_built"])
    finally:
        _C.set_deterministic(False)
    assert built == [1, 2, 2, 2]
