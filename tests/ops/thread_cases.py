"""Operators large enough for many threads, at 1, 3, 4, 7 and 16 of them, more than there are cores: the same bits.

`python tests/ops/thread_cases.py` runs in a process of its own, since what it looks for may end one. Programs are
built at each number, built at one and run at others, and forward and backward have different ones. Between calls torch
runs operators of its own on its threads, whose floating-point mode must be as it was. Products go to our own kernel,
whose sums do not depend on threads; those of a library may, and are compared within a tolerance.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from harness import C, Case, R, _arrays, _grad_inputs, _run_inputs, _tensor, call, session_of

from onnxtrain import _C

COUNTS = (1, 3, 4, 7, 16)
CHANGES = ((1, 16), (16, 3), (3, 1), (7, 4))  # between forward and backward
CHANNELS = [R(12, low=0.5), R(12), R(12), R(12, low=0.5)]

CASES = [
    *(Case(op, [R(n)]) for op in ("Gelu", "Tanh") for n in (40_000, 90_001)),  # two, three and more shares
    Case("Add", [R(700, 129), R(129)]),
    Case("Mul", [R(33, 4, 257), R(1, 4, 1)]),
    Case("Softmax", [R(300, 401)]),
    Case("LogSoftmax", [R(37, 3001)]),
    Case("LayerNormalization", [R(301, 257), R(257), R(257)]),
    Case("RMSNormalization", [R(301, 257), R(257)], opset=23),
    Case("GroupNormalization", [R(5, 12, 31, 33), R(12), R(12)], {"num_groups": 4}, opset=21),
    Case("GroupNormalization", [R(70, 36, 4, 5), R(36), R(36)], {"num_groups": 4}, opset=21),
    Case("BatchNormalization", [R(9, 12, 31, 33), *CHANNELS], {"training_mode": 1}, n_outputs=3, grad=(0, 1, 2), no_grad_outputs=(1, 2)),
    Case("ReduceSum", [R(300, 1001), C([0])]),
    Case("ReduceMean", [R(300, 1001), C([1])]),
    Case("ReduceMean", [R(70_001), C([0])]),
    Case("ReduceMax", [R(300, 1001), C([1])]),
    Case("CumSum", [R(300, 501), C(1)]),
    Case("MaxPool", [R(3, 7, 65, 67)], {"kernel_shape": [3, 3], "strides": [2, 2]}),
    Case("AdaptiveAveragePool", [R(3, 7, 65, 67), C([7, 13])], domain="ai.onnxtrain"),
    Case("MaxPool", [R(70, 32, 8, 7)], {"kernel_shape": [3, 3]}),
    Case("AveragePool", [R(3, 7, 65, 67)], {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}),
    Case("Gather", [R(3000, 128), R(5000, low=0, high=3000, dtype=np.int64)]),
    Case("Gather", [R(40, 1024), R(900, low=0, high=3, dtype=np.int64)]),  # most hits in one row
    Case("GatherElements", [R(300, 401), R(300, 401, low=0, high=300, dtype=np.int64)], {"axis": 0}),
    Case("ScatterElements", [R(5000, 7), R(5000, 7, low=0, high=7, dtype=np.int64), R(5000, 7)],
         {"axis": 1, "reduction": "add"}),
    Case("Transpose", [R(61, 47, 53)], {"perm": [2, 0, 1]}),
    *(Case(op, [R(200, 700), C([50])], domain=domain, n_outputs=2, grad=(0,), no_grad_outputs=(1,))
      for op, domain in (("TopK", ""), ("TorchTopK", "ai.onnxtrain"))),
    Case("ReduceLogSumExp", [R(20_000, 5), C([1])]),
    Case("Conv", [R(3, 6, 5, 9, 20), R(6, 1, 3, 3, 3), R(6)], {"group": 6, "pads": [1] * 6}),
    Case("SoftmaxCrossEntropyLoss", [R(400, 1001), R(400, low=0, high=1001, dtype=np.int64)]),
    Case("MatMul", [R(333, 257), R(257, 519)]),
    Case("Gemm", [R(3000, 256), R(1024, 256), R(1024)], {"transB": 1}),
    Case("Gemm", [R(48, 1030), R(700, 1030), R(700)], {"transB": 1}),  # turned, by the number of threads
    Case("Gemm", [R(700, 520), R(520, 130)], {"transA": 0}),
    Case("MatMul", [R(17, 63, 95), R(17, 95, 70)]),
    Case("Attention", [R(1, 1, 700, 96)] * 3, {"is_causal": 1}, opset=23, name="causal"),
    Case("Attention", [R(2, 5, 150, 32), R(2, 5, 170, 32), R(2, 5, 170, 32), R(1, 1, 150, 170)], opset=23),
    Case("Resize", [R(2, 6, 40, 41), None, C([1, 1, 2, 2], np.float32)], {"mode": "linear"}, grad=(0,)),
    Case("Pad", [R(60, 70, 31), C([1, 2, 3, 4, 5, 6])], {"mode": "reflect"}),
    Case("Dropout", [R(90_001), C(0.3, np.float32), C(True, np.bool_)], n_outputs=1, grad=(0,)),
    Case("ScatterND", [R(500, 90), R(300, 1, low=0, high=500, dtype=np.int64), R(300, 90)], {"reduction": "add"}),
    Case("Conv", [R(9, 24, 250), R(24, 1, 9), R(24)], {"pads": [4, 4], "group": 24}),
    Case("Conv", [R(3, 12, 33, 35), R(20, 12, 3, 3), R(20)], {"pads": [1, 1, 1, 1]}, kernels=False),
    Case("ConvTranspose", [R(3, 12, 17, 19), R(12, 8, 3, 3), R(8)], {"strides": [2, 2]}, kernels=False),
    Case("LSTM", [R(20, 16, 40), R(1, 256, 40), R(1, 256, 64), R(1, 512)], {"hidden_size": 64}, n_outputs=3),
    Case("GridSample", [R(2, 5, 40, 41), R(2, 60, 61, 2, low=-1.0, high=1.0)]),
]
PRODUCTS = ("MatMul", "Gemm", "LSTM")
OURS = "native" in _C.build_info()["gemm"]


def torch_is_as_before(expected: int, what: str) -> None:
    """torch's own threads: none traps, and none of them takes denormals as zero."""
    torch.randn(1 << 17).mul(1.1)
    kept = int(((torch.full((1 << 17,), 1e-40) + 1e-40) != 0).sum())
    assert kept == expected, f"{what}: torch keeps {kept} denormals of {expected}"


def results(session: _C.Session, tensors: list[torch.Tensor], wants: bytes, grads: list, after: int) -> list:
    """Outputs and gradients; backward with `after` threads."""
    outputs, run = session.forward(tensors, wants, 7)
    if run is None:
        return list(outputs)
    torch.set_num_threads(after)
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    given = [g if flag else None for g, flag in zip(grads, run.differentiable)]
    return [*outputs, *run.backward(saved, given)]


def equal(a: torch.Tensor | None, b: torch.Tensor | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    if tolerance and a.is_floating_point():
        return bool((a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max())))
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def tolerance(case: Case) -> float:
    """0: the same bits. Where a product goes is read when a program is built."""
    os.environ.pop("ONNXTRAIN_GEMM", None)
    if case.op_type in PRODUCTS and OURS:
        os.environ["ONNXTRAIN_GEMM"] = "native"
        return 0
    return 1e-4 if case.op_type in ("Conv", "ConvTranspose", *PRODUCTS) else 0


def check(case: Case) -> None:
    within = tolerance(case)
    arrays = _arrays(case, np.float32)
    tensors = [_tensor(arrays[i]) for i in _run_inputs(case, arrays)]
    torch.set_num_threads(1)
    first = session_of(case, arrays)
    outputs, _ = call(first, tensors, b"\0" * len(tensors), None, 7)
    grads = [torch.linspace(-1, 1, o.numel()).view_as(o) if i not in case.no_grad_outputs else None
             for i, o in enumerate(outputs)]
    wants = bytes([i in _grad_inputs(case, arrays) for i in _run_inputs(case, arrays)])
    expected = results(first, tensors, wants, grads, 1)
    expected = [t if t is None else t.clone() for t in expected]
    for before, after in (*((n, n) for n in COUNTS[1:]), *CHANGES, (1, 1)):
        torch.set_num_threads(before)
        what = f"{case} with {before} threads, then {after}"
        for session in (first, session_of(case, arrays)):
            torch.set_num_threads(before)
            for i, (a, b) in enumerate(zip(results(session, tensors, wants, grads, after), expected, strict=True)):
                assert equal(a, b, within), f"{what}: result {i} differs"
        torch_is_as_before(1 << 17, what)


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.op_type in names:
            print(case, flush=True)
            check(case)


if __name__ == "__main__":
    main(sys.argv[1:])
