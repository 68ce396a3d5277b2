"""ORTModule on a device, for programs.py."""

from __future__ import annotations

import copy

import smoke
import torch
from compare import operators, place

import onnxtrain
from onnxtrain import _report
from onnxtrain.ortmodule import ORTModule, _device, _runner


def ortmodule(device: str) -> set[str]:
    """ORTModule on the device: five steps of the sample's transformer as in eager, none of them in PyTorch."""
    _runner.device_of = lambda tensors: device
    torch.manual_seed(0)
    model, data = smoke.language()
    model = model.to(place(device))
    batches = [tuple(t.to(place(device)) for t in data()) for _ in range(3)]
    wrapped = ORTModule(copy.deepcopy(model))
    want, first = smoke.train(model, batches)
    got, ours = smoke.train(wrapped, batches)
    assert max(abs(a - b) for a, b in zip(want, got, strict=True)) < 1e-4, (want, got)
    assert smoke.farthest(ours, first) < 1e-4
    told = onnxtrain.explain(wrapped)
    assert "CUDA graph of backward: recorded 0 times, replayed 0 times; the latest call ran without it: steps are timed" \
        in told, told
    sessions = [session for program in _report._programs for session in program.sessions]
    built = sum(session.stats()["programs_built"] for session in sessions)
    try:
        torch.backends.cuda.matmul.allow_tf32 = True  # between two steps
        wrapped(batches[0][0])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        _device.tell_tf32()
    assert sum(session.stats()["programs_built"] for session in sessions) == built + 1
    names = {f"{op}:{kernel}" for program in _report._programs for session in program.sessions
             for op, kernel in operators(session)}
    assert "MatMul:cuda_matmul" in names or "Gemm:cuda_matmul" in names or "FusedMatMul:cuda_matmul" in names, names
    return names
