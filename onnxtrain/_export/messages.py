"""What torch says of an export: kept quiet meanwhile, and told in a sentence when it stops. Called by export.py."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator

import torch

from onnxtrain._export.errors import Untraceable

_FRAME = re.compile(r'File "(.+)", line (\d+), in .*\n\s*(.*)')
_OF_GUARD = re.compile(r"  # (.+?)  # (\S+):(\d+) in ")
_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_NODE = re.compile(r"(?:translating node|While executing) %(\w+)")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch warns of what is put right here, and prints a traced graph when it fails."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch._export", "torch.fx",
                                                    "torch._subclasses.fake_tensor", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), \
                contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def root(error: BaseException) -> BaseException:
    """The exception that torch wrapped."""
    while (inner := error.__cause__) is not None:
        error = inner
    return error


def line(trace: str | None) -> str:
    """ ", in FILE, line N (CODE)": the innermost of the user's lines in a stack trace, or that of a guard, in the form
    that torch gives it; empty where there is none.
    """
    own = [frame for frame in _FRAME.findall(trace or "") if not frame[0].startswith(_NOT_THE_USERS)]
    if not own:
        found = [(_whole(file), number, code) for code, file, number in _OF_GUARD.findall(trace or "")]
        own = [frame for frame in found if not frame[0].startswith(_NOT_THE_USERS)]
    return ", in {}, line {} ({})".format(*own[-1]) if own else ""


def _whole(end: str) -> str:
    """The file of an imported module whose path ends so."""
    files = [str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]]
    return next((file for file in files if file.endswith(end)), end)


def raised_at(error: BaseException, trace: str | None) -> None:
    """Has reason() name the user's line; the first call for an exception counts."""
    error.__dict__.setdefault("user_line", line(trace))


def raised_by_node(error: BaseException, program: torch.export.ExportedProgram) -> None:
    """raised_at() of the node that the exception names."""
    named = _NODE.search(str(error))
    for part in program.graph_module.modules() if named else ():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if node.name == named[1]:  # type: ignore[index]
                raised_at(error, node.meta.get("stack_trace"))


def reason(error: BaseException) -> str:
    """The one sentence of an ExportError, with the user's line where that is known."""
    cause, at, link = root(error), "", error
    while not at and link is not None:
        at, link = link.__dict__.get("user_line", ""), link.__cause__  # type: ignore[assignment]
    return f"{_said(cause).removesuffix('.')}{at}" if at else _said(cause)


def _said(cause: BaseException) -> str:
    if isinstance(cause, Untraceable):
        return str(cause)
    text = " ".join(str(cause).split())
    text = re.sub(r"\x1b\[\d+m", "", text)
    text = re.split(" For more information|Caused by:| While executing %| Original traceback:", text)[0]
    if type(cause).__name__ == "GuardOnDataDependentSymNode":
        text = f"Python code branches on, or reads, the value of a tensor: {text}"
    return f"The export stopped with {type(cause).__name__}: {text[:800].strip()}"
