"""DebugOptions and LogLevel: what a user asks to see of the engine."""

from __future__ import annotations

import enum
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import onnx

from onnxtrain import UnsupportedError, options
from onnxtrain._export.exported import OPSETS


class LogLevel(enum.IntEnum):
    """How much ORTModule says, from all to nothing but what ends the process."""
    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5

    @property
    def logging_level(self) -> int:
        """The level of Python's `logging` that lines of this level have."""
        return (10, 10, 20, 30, 40, 50)[self]


_log = logging.getLogger("onnxtrain")
STAGES = ("torch_exported", "post_processed", "optimized_pre_grad", "optimized", "execution_model")


class DebugOptions:
    """How much ORTModule says and what it writes.

    Args:
        log_level: lines below it are not made. ORTMODULE_LOG_LEVEL overrides it.
        save_onnx: write `{onnx_prefix}_{stage}_{training|inference}.onnx` for each of STAGES when a program is new: as
            torch exported it, as it was loaded, with its sizes and before its gradient, with its backward part, and
            what runs. Where Dynamo makes several graphs of the module, the stages of the second end in `_graph1`, and
            so on. Weights are inputs of these graphs. They pass onnx.checker; operators of the engine's own are in
            the domain ai.onnxtrain.
        onnx_prefix: file prefix, not empty with save_onnx.
        save_path: folder for those files, "" for the current one; ORTMODULE_SAVE_ONNX_PATH overrides it.
        config: kept as it is, for scripts that pass one.
        verify: compare the first step of every program (an int: the first so many) with eager PyTorch, dropout off in
            both: outputs, gradients, buffers. A table is logged; VerificationError above tolerance.

    Raises:
        TypeError: log_level is no LogLevel, onnx_prefix no str, or verify no number.
        ValueError: save_onnx without onnx_prefix.
        OSError: the folder cannot be written.
    """

    def __init__(self, log_level: LogLevel = LogLevel.WARNING, save_onnx: bool = False, onnx_prefix: str = "",
                 save_path: str = "", config: object = None, verify: bool | int = False) -> None:
        if not isinstance(log_level, LogLevel):
            raise TypeError(f"Expected log_level of type LogLevel, got {type(log_level)}.")
        if not isinstance(onnx_prefix, str):
            raise TypeError(f"Expected name prefix of type str, got {type(onnx_prefix)}.")
        if save_onnx and not onnx_prefix:
            raise ValueError("onnx_prefix must be provided when save_onnx is set.")
        if not isinstance(verify, int):
            raise TypeError(f"verify is {verify!r}, expected True, False or a number of steps.")
        level = options.read("ORTMODULE_LOG_LEVEL")
        self.log_level = log_level if level is None else LogLevel[level]
        self.save_onnx = save_onnx
        self.onnx_prefix = onnx_prefix
        self.save_path = Path(options.read("ORTMODULE_SAVE_ONNX_PATH") or save_path or ".")
        self.config = config
        self.verify = int(verify)
        if save_onnx and not os.access(self.save_path, os.W_OK | os.X_OK):
            raise OSError(f"Directory {self.save_path} is not writable.")

    @property
    def logging(self) -> types.SimpleNamespace:
        """log_level under the name that scripts read it by."""
        return types.SimpleNamespace(log_level=self.log_level)

    @property
    def save_onnx_models(self) -> types.SimpleNamespace:
        """save, path and name_prefix, as scripts read them."""
        return types.SimpleNamespace(save=self.save_onnx, path=str(self.save_path), name_prefix=self.onnx_prefix)

    @property
    def logging_level(self) -> int:
        """The level of Python's `logging` for log_level."""
        return self.log_level.logging_level

    def log(self, level: int, text: str, *args: object) -> None:
        """A line of the logger "onnxtrain", unless it is below log_level; that decides, not the level of a logger
        above.

        Without any logging configuration it goes to stderr.
        """
        if level < self.logging_level or _log.level > level:
            return
        record = _log.makeRecord(_log.name, level, "", 0, text, args, None)
        if _log.hasHandlers():
            _log.handle(record)
        else:
            print(record.getMessage(), file=sys.stderr)

    def write_models(self, program: Any, training: bool, number: int, opset: int) -> None:
        """Writes every stage of each segment of a program.

        Args:
            number: of its graph in the module.
            opset: of the files, which have their own where they have no form in this one.
        """
        graph = f"_graph{number}" if number else ""
        self._write(program.exported.model, STAGES[0] + graph, training, opset)
        for part, session in enumerate(program.sessions):
            suffix = graph + (f"_part{part}" if len(program.sessions) > 1 else "")
            for stage in STAGES[1:]:
                self._write(session.save(stage), stage + suffix, training, opset)

    def _write(self, model: bytes, stage: str, training: bool, opset: int) -> None:
        """Writes a model beside its final name and renames it."""
        try:
            model = in_opset(model, opset)
        except UnsupportedError as error:
            self.log(logging.WARNING, "ORTModule: %s_%s keeps its opset: %s", self.onnx_prefix, stage, error)
        path = self.save_path / f"{self.onnx_prefix}_{stage}_{'training' if training else 'inference'}.onnx"
        fresh = path.with_suffix(".onnx.new")
        fresh.write_bytes(model)
        fresh.replace(path)


def in_opset(model: bytes, opset: int) -> bytes:
    """A model that is seen or saved, in an older opset than exports have where a script asks for one.

    Raises:
        UnsupportedError: operators have no form in this opset; the message names them.
    """
    if opset >= OPSETS[0]:
        return model
    from onnxtrain.training._opset import converted

    return converted(onnx.load_from_string(model), opset).SerializeToString()
