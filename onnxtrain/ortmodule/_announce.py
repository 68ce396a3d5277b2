"""What ORTModule says once per mode, at WARNING, on rank 0: which features are on, and what starting up cost."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

_log = logging.getLogger("onnxtrain")


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0") or 0)


def features(program: Any, fallback: Any) -> list[tuple[str, bool, str]]:
    """(feature, on, remark) of one program."""
    text = program.session.text("loaded")
    return [
        ("Fallback to PyTorch", fallback is not None, "ORTMODULE_FALLBACK_POLICY"),
        ("Custom autograd functions", "PythonOp" in text, "PythonOp nodes of this graph"),
        ("Random numbers", program.session.random, "dropout and the like, keyed by torch's generator"),
    ]


def ready(name: str, training: bool, program: Any, debug: Any) -> None:
    """One table and one line; nothing on ranks other than 0."""
    if _rank() != 0:
        return
    exported, session = program.exported, program.session.stats()
    mode = "training" if training else "inference"
    export_seconds = exported.seconds.get("total", 0.0)
    build = program.build_seconds + session["build_seconds"]
    rows = [f"  {feature:<28} {'ON' if on else 'OFF':<4} {remark}" for feature, on, remark in features(program, debug)]
    _log.warning("ORTModule: %s is ready for %s\n%s\n  initialization overhead %.2f s, of which export took %.2f s and the "
                 "build %.3f s", name, mode, "\n".join(rows), export_seconds + build, export_seconds, build)
