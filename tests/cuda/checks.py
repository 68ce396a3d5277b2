"""What the scripts of this folder share: their report, and the choice of a part of their checks.

A script prints a line of JSON for each case as soon as it has its result, {"case": NAME, "result": "passed", "failed"
or "refused", "message": TEXT}, and the report as the last line. runner.py reads both.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import onnx
import torch
from onnx import TensorProto, helper
from torch import nn

from onnxtrain import _C

T = TypeVar("T")


class Report:
    """The results of one script: `ran`, the kernels that passing cases used, as "Op:kernel"; `passed`, a count;
    `refused`, messages by case; `failed`, pairs of case and message.
    """

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self.passed = 0
        self.refused: dict[str, str] = {}
        self.failed: list[tuple[str, str]] = []

    def begin(self, case: str) -> None:
        """Names the case on stderr, so that a crash can be attributed."""
        print(case, file=sys.stderr, flush=True)

    def passes(self, case: str, ran: Iterable[str] = ()) -> None:
        self.ran.update(ran)
        self.passed += 1
        self._line(case, "passed", "")

    def refuses(self, case: str, message: str) -> None:
        self.refused[case] = message
        self._line(case, "refused", message)

    def fails(self, case: str, message: str) -> None:
        self.failed.append((case, message))
        self._line(case, "failed", message)

    def raised(self, case: str, error: Exception) -> None:
        self.fails(case, f"{type(error).__name__}: {error}"[:1000])

    def _line(self, case: str, result: str, message: str) -> None:
        print(json.dumps({"case": case, "result": result, "message": message}), flush=True)

    def finish(self, **more: object) -> None:
        """Prints the whole report, with what else the script has found."""
        report = {"ran": sorted(self.ran), "passed": self.passed, "failed": self.failed, "refused": self.refused}
        print(json.dumps({**report, **more}), flush=True)


def in_part(name: str, part: str) -> bool:
    """Whether a case belongs to a part, "index/parts"; by its name, whatever the other cases are."""
    index, parts = map(int, part.split("/"))
    return zlib.crc32(name.encode()) % parts == index


def every_nth(checks: Sequence[T], part: str) -> Sequence[T]:
    """The checks of a part, "index/parts": evenly many in each."""
    index, parts = map(int, part.split("/"))
    return checks[index::parts]


def run_checks(checks: Iterable[Callable[[], set[str] | None]],
               before: Callable[[Callable], None] = lambda check: None) -> None:
    """Calls every check, whatever became of those before it, and prints the report. A check returns the kernels that it
    used, or None. `before` is called with each check first.
    """
    report = Report()
    for check in checks:
        report.begin(check.__name__)
        try:
            before(check)
            report.passes(check.__name__, check() or ())
        except Exception as error:  # noqa: BLE001 - reported
            report.raised(check.__name__, error)
    report.finish()


def refusal(call: Callable[[], object]) -> str:
    """The message of the UnsupportedError that a call raises; empty where it raises none."""
    try:
        call()
    except _C.UnsupportedError as error:
        return str(error)
    return ""


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether tensors of the CPU and of the device agree to within what an update in `dtype` rounds."""
    tol = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    return torch.allclose(a.double().cpu(), b.double().cpu(), rtol=tol, atol=tol, equal_nan=True)


def replayed(session: _C.Session, step: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Eight steps, of which the last are replayed from graphs: each gives what the first gave, bit for bit."""
    _C.set_timing(False)
    try:
        first, *others = (step() for _ in range(8))
        assert all(torch.equal(a, b) for later in others for a, b in zip(first, later, strict=True))
        assert all(times >= 2 for _, _, times, _ in session.graphs()), session.graphs()
    finally:
        _C.set_timing(True)
    return first


class Messages(logging.Handler):
    """What the core logs."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + chr(10)

    def count(self, part: str) -> int:
        return self.text.count(part)


def exported(module: nn.Module, inputs: tuple) -> tuple[bytes, list[torch.Tensor]]:
    """The module's model, weights as inputs behind its own, and the tensors to call it with."""
    buffer = io.BytesIO()
    torch.onnx.export(module, inputs, buffer, dynamo=False, training=torch.onnx.TrainingMode.TRAINING,
                      do_constant_folding=False, export_params=True, opset_version=17, keep_initializers_as_inputs=True)
    model = onnx.load_model_from_string(buffer.getvalue())
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    names = [i.name for i in model.graph.initializer if i.name in state]
    kept = [i for i in model.graph.initializer if i.name not in state]
    given = [i for i in model.graph.input if i.name not in {k.name for k in kept} and i.name not in names]
    weights = [helper.make_tensor_value_info(n, TensorProto.FLOAT, state[n].shape) for n in names]
    del model.graph.initializer[:], model.graph.input[:]
    model.graph.initializer.extend(kept)
    model.graph.input.extend([*given, *weights])
    return model.SerializeToString(), [*inputs, *(state[n].detach() for n in names)]
